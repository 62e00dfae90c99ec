"""Checkpoints of a training run: complete or absent, never half-written.

    OUTPUT/step-00000100/
        module.safetensors   the module's tensors, float32
        optimizer.pt         the DeepSpeed optimizer's state
        state.json           step, rows consumed, running acceptance, options, fingerprints

In joint mode each rank has a part: `stage-0.safetensors`, `optimizer-0.pt` and so on (see
`shared_checkpoint`). A checkpoint is written to a temporary folder beside it, synced and renamed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_spd.config import TrainOptions
from megatron_spd.errors import CheckpointError, listing

FORMAT_VERSION = 2
MODULE_FILE = "module.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
_NAME = re.compile(r"step-(\d{8})")
_PLACES = ("data", "output", "save_every_steps")
"""Options that may change on resume: the data has a fingerprint, the others change no number."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands. Everything random follows from the seed and these numbers."""

    step: int
    """Optimizer steps done."""
    rows_consumed: int
    """Packed rows done; the next row's index."""
    acceptance: float
    """Running acceptance."""
    plan_fingerprint: str
    """Of the plan that the module is trained for."""
    cut_fingerprint: str
    """Of the plan by which the trained target is cut into parts; empty when it is frozen."""
    data_fingerprint: str
    target_hash: str
    """Of the weights that the run started from; empty when the caller gave none."""
    options: dict[str, Any]
    """The train options that a step depends on."""
    format_version: int = FORMAT_VERSION


def options_of(options: TrainOptions) -> dict[str, Any]:
    """The options that must be the same when a run goes on, as JSON would give them back."""
    chosen = {name: value for name, value in asdict(options).items() if name not in _PLACES}
    plain: dict[str, Any] = json.loads(json.dumps(chosen))
    return plain


@contextmanager
def becoming(output: Path, state: RunState) -> Iterator[Path]:
    """A temporary folder that becomes the checkpoint of `state.step` when the block ends well.

    An existing checkpoint of that step is replaced. A block that fails leaves nothing.
    """
    output.mkdir(parents=True, exist_ok=True)
    final = output / f"step-{state.step:08d}"
    partial = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=output))
    try:
        yield partial
        text = json.dumps(asdict(state), indent=2, sort_keys=True) + "\n"
        (partial / "state.json").write_text(text, encoding="utf-8")
        for path in (partial / "state.json", partial):
            _sync(path)
        partial.chmod(0o755)
        if final.exists():
            replaced = Path(tempfile.mkdtemp(prefix=f".{final.name}.old.", dir=output))
            final.rename(replaced / final.name)
            partial.rename(final)
            shutil.rmtree(replaced)
        else:
            partial.rename(final)
        _sync(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def save_checkpoint(
    output: Path, state: RunState, tensors: Mapping[str, Tensor], optimizer: Mapping[str, Any]
) -> None:
    """Writes the checkpoint of a run whose only trained rank is this one."""
    with becoming(output, state) as partial:
        write_tensors(partial / MODULE_FILE, tensors)
        write_optimizer(partial / OPTIMIZER_FILE, optimizer)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes one file of tensors and syncs it."""
    plain = {name: part.detach().cpu().contiguous().clone() for name, part in tensors.items()}
    save_file(plain, path)
    _sync(path)


def write_optimizer(path: Path, optimizer: Mapping[str, Any]) -> None:
    """Writes an optimizer's state and syncs it."""
    torch.save(dict(optimizer), path)
    _sync(path)


def latest_checkpoint(output: Path) -> Path | None:
    """The complete checkpoint with the most steps, or None."""
    if not output.is_dir():
        return None
    found = [path for path in output.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return max(found, key=lambda path: path.name, default=None)


def load_state(folder: Path) -> RunState:
    """The run state of a checkpoint.

    Raises:
        CheckpointError: the file is missing, damaged, or of another format.
    """
    path = folder / "state.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    version = values.get("format_version") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {version}, this program reads {FORMAT_VERSION}; "
            "train again or use the program that wrote it"
        )
    names = {field.name for field in fields(RunState)}
    if set(values) != names:
        raise CheckpointError(f"{path} must have the fields {', '.join(sorted(names))}")
    return RunState(**values)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """What `write_tensors` wrote.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        return load_file(path)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint file {path} cannot be read: {error}") from error


def read_optimizer(path: Path) -> dict[str, Any]:
    """What `write_optimizer` wrote.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, UnpicklingError) as error:
        # torch's further lines advise to trust the file
        reason = (str(error).splitlines() or ["it is damaged"])[0]
        raise CheckpointError(f"the checkpoint file {path} cannot be read: {reason}") from error
    return state


def load_tensors(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_checkpoint` wrote: the module's tensors and the optimizer's state.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    return read_tensors(folder / MODULE_FILE), read_optimizer(folder / OPTIMIZER_FILE)


def check_same_run(folder: Path, found: RunState, here: RunState) -> None:
    """Refuses to resume another run.

    Args:
        folder: the checkpoint, for the message.
        found: its state.
        here: what this run would have saved at the same step.

    Raises:
        CheckpointError: naming each field that differs, with both values.
    """
    problems = [
        f"train.{name} is {here.options.get(name)!r} here but {found.options.get(name)!r} "
        "in the checkpoint"
        for name in sorted({*here.options, *found.options})
        if here.options.get(name) != found.options.get(name)
    ]
    problems += [
        f"{field.name} is {getattr(here, field.name)!r} here but "
        f"{getattr(found, field.name)!r} in the checkpoint"
        for field in fields(RunState)
        if field.name not in ("acceptance", "options")
        and getattr(here, field.name) != getattr(found, field.name)
    ]
    if problems:
        raise CheckpointError(
            listing(
                f"{folder} belongs to another run; give its options or another train.output",
                problems,
            )
        )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
