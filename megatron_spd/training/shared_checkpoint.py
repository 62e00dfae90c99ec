"""Checkpoints that every rank writes a part of: all parts are there, or there is no checkpoint.

    OUTPUT/step-00000100/
        stage-0.safetensors  optimizer-0.pt     of the rank of stage 0
        stage-1.safetensors  optimizer-1.pt     of the rank of stage 1, here the last
        module.safetensors                      its module
        state.json

The last stage's rank leads: it makes the temporary folder, and renames it when every rank has said
that its part is written. The ranks must share the file system of OUTPUT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from torch import Tensor

from megatron_spd import comm
from megatron_spd.errors import CheckpointError
from megatron_spd.training import checkpointing
from megatron_spd.training.checkpointing import RunState

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank contributes."""

    stage: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    """File name without its ending to tensors."""
    optimizer: Mapping[str, Any]


def save_together(output: Path, leading: RunState | None, part: Part) -> None:
    """Writes one checkpoint; every rank calls it, the leader with the run's state.

    Raises:
        CheckpointError: on every rank, when one could not write its part.
        CommError: a rank was lost; the leader removes what was written.
    """
    world = comm.current_world()
    if leading is None:
        folder = output / _first(world.gather(""))
        _on_all(lambda: _write(folder, part))
    else:
        with checkpointing.becoming(output, leading) as folder:
            world.gather(folder.name)
            _on_all(lambda: _write(folder, part))
    # Nobody may go on before the rename: a rank that ends now must find this checkpoint.
    world.gather("")


def load_together(
    output: Path, leads: bool, stage: int, names: tuple[str, ...], here: Callable[[int], RunState]
) -> tuple[RunState, Part] | None:
    """The newest checkpoint, as the leader sees it; None on every rank when there is none.

    Args:
        leads: whether this rank leads.
        stage: this rank's stage.
        names: this rank's files of tensors, without their ending.
        here: the state that this run would have saved after so many steps.

    Raises:
        CheckpointError: on every rank, when one cannot read its part or it is of another run.
    """
    newest = checkpointing.latest_checkpoint(output) if leads else None
    name = _first(comm.current_world().gather(newest.name if newest else ""))
    if not name:
        return None
    folder = output / name

    def load() -> tuple[RunState, Part]:
        state = checkpointing.load_state(folder)
        checkpointing.check_same_run(folder, state, here(state.step))
        tensors = {
            name: checkpointing.read_tensors(folder / f"{name}.safetensors") for name in names
        }
        optimizer = checkpointing.read_optimizer(folder / f"optimizer-{stage}.pt")
        return state, Part(stage=stage, tensors=tensors, optimizer=optimizer)

    return _on_all(load)


def _write(folder: Path, part: Part) -> None:
    for name, tensors in part.tensors.items():
        checkpointing.write_tensors(folder / f"{name}.safetensors", tensors)
    checkpointing.write_optimizer(folder / f"optimizer-{part.stage}.pt", part.optimizer)


def _first(texts: list[str]) -> str:
    return next((text for text in texts if text), "")


def _on_all(action: Callable[[], _Result]) -> _Result:
    """The action's result, once it went well on every rank; else every rank raises."""
    world = comm.current_world()
    problem, done = "", list[_Result]()
    try:
        done.append(action())
    except (OSError, RuntimeError, CheckpointError, SafetensorError) as error:
        problem = f"{world.names.of(world.rank)}: {error}"
    said = sorted({text for text in world.gather(problem) if text})
    if said:
        raise CheckpointError(
            f"{'; '.join(said)} (all ranks of joint training must see the same train.output)"
        )
    return done[0]
