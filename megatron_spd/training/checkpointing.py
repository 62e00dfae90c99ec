"""Checkpoints of a training run: complete or absent, never half-written.

    OUTPUT/step-00000100/
        module.safetensors   the module's tensors, float32
        optimizer.pt         the DeepSpeed optimizer's state
        state.json           step, rows consumed, running acceptance, fingerprints

A checkpoint is written to a temporary folder beside it, synced and renamed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_spd.errors import CheckpointError

FORMAT_VERSION = 1
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands. Everything random follows from the seed and these numbers."""

    step: int
    """Optimizer steps done."""
    rows_consumed: int
    """Packed rows done; the next row's index."""
    acceptance: float
    """Running acceptance."""
    seed: int
    plan_fingerprint: str
    """Of the plan that the module is trained for."""
    data_fingerprint: str
    format_version: int = FORMAT_VERSION


def save_checkpoint(
    output: Path, state: RunState, tensors: Mapping[str, Tensor], optimizer: Mapping[str, Any]
) -> Path:
    """Writes one checkpoint and returns its folder; an existing one of that step is replaced."""
    output.mkdir(parents=True, exist_ok=True)
    final = output / f"step-{state.step:08d}"
    partial = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=output))
    try:
        plain = {name: part.detach().cpu().contiguous().clone() for name, part in tensors.items()}
        save_file(plain, partial / "module.safetensors")
        torch.save(dict(optimizer), partial / "optimizer.pt")
        text = json.dumps(asdict(state), indent=2, sort_keys=True) + "\n"
        (partial / "state.json").write_text(text, encoding="utf-8")
        for path in (*sorted(partial.iterdir()), partial):
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
    return final


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
    names = {field.name for field in fields(RunState)}
    if not isinstance(values, dict) or set(values) != names:
        raise CheckpointError(f"{path} must have the fields {', '.join(sorted(names))}")
    if values["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {values['format_version']}, this program reads {FORMAT_VERSION}"
        )
    return RunState(**values)


def load_tensors(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The module's tensors and the optimizer's state.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    try:
        tensors = load_file(folder / "module.safetensors")
        optimizer = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {folder} cannot be read: {error}") from error
    return tensors, optimizer


def check_same_run(folder: Path, state: RunState, **expected: object) -> None:
    """Refuses to resume another run.

    Raises:
        CheckpointError: naming each field that differs, with both values.
    """
    problems = [
        f"{name} is {value!r} here but {getattr(state, name)!r} in the checkpoint"
        for name, value in expected.items()
        if getattr(state, name) != value
    ]
    if problems:
        raise CheckpointError(f"{folder} belongs to another run:\n- " + "\n- ".join(problems))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
