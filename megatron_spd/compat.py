"""What Megatron-core needs to run on CPU ranks: one place, each patch with its reason.

Nothing here is used where CUDA is present. The patches of `apply` last for the life of the process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_spd.errors import CompatError

MEGATRON_VERSION = "0.16"

_applied: list[bool] = []

# What Megatron-core says of itself on import and for every configuration, whatever its user does.
for _message in (
    "(Transformer Engine and Apex are|Apex is) not installed",
    "full scope is deprecated. Use empty cuda_graph_scope",
):
    warnings.filterwarnings("ignore", message=_message, module=r"megatron\.core\.")


class CpuFactories(TorchFunctionMode):
    """Sends factory calls that ask for a CUDA device to the CPU; other calls pass unchanged."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` with `device="cuda"` (or its index or object) replaced by the CPU."""
        if not kwargs:
            return func(*args)
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


def needed() -> bool:
    """Whether this process has no CUDA device, so that `apply` is due."""
    return not torch.cuda.is_available()


def apply() -> None:
    """Make Megatron-core run on CPU. A second call does nothing.

    Raises:
        CompatError: CUDA is present, or megatron-core is not the version the patches are for.
    """
    if _applied:
        return
    if torch.cuda.is_available():
        raise CompatError("compat.apply() is for CPU ranks, but CUDA is present; do not call it")
    _check_version()
    _patch_current_device()
    _patch_synchronize()
    _patch_rng_tracker()
    _applied.append(True)


def cpu_factories() -> AbstractContextManager[object]:
    """Around a call of Megatron's schedule: it creates tensors with a literal `device="cuda"`.

    Every torch call inside costs a detour through Python, so decoding stays out of it. Where CUDA
    is present it does nothing.
    """
    return CpuFactories() if needed() else nullcontext()


def _check_version() -> None:
    try:
        found = version("megatron-core")
    except PackageNotFoundError as error:
        raise CompatError(f"megatron-core {MEGATRON_VERSION} is not installed") from error
    if not found.startswith(f"{MEGATRON_VERSION}."):
        raise CompatError(
            f"the CPU patches are for megatron-core {MEGATRON_VERSION}, found {found}; "
            f"install megatron-core=={MEGATRON_VERSION}.*"
        )


def _patch_current_device() -> None:
    """Layers, buffers and receives are allocated on `torch.cuda.current_device()`."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]


def _patch_synchronize() -> None:
    """The schedule's sends and the timers synchronise CUDA; a CPU has nothing to wait for."""
    torch.cuda.synchronize = lambda device=None: None


def _patch_rng_tracker() -> None:
    """The default tracker reads and sets CUDA generator states; the inference one never forks."""
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
