"""Megatron's parallel state for a process that runs one stage by itself."""

from __future__ import annotations

from megatron.core import parallel_state

from megatron_spd import comm, compat


def init_single_rank() -> None:
    """Make every rank its own model-parallel group (TP = PP = 1); a second call does nothing.

    Uses the world that was joined, or creates one of a single rank. Where there is no CUDA it
    applies `compat`.
    """
    comm.init_local()
    if compat.needed():
        compat.apply()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=1, pipeline_model_parallel_size=1
        )
