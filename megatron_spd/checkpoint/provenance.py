"""What produced a folder is written beside its files: run.toml and provenance.json."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tomli_w

import megatron_spd
from megatron_spd.checkpoint.atomic import write_atomic

RECORDED = ("torch", "megatron-core", "deepspeed", "transformers", "safetensors")


def write_run(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write the resolved configuration as `run.toml` (fields that are None are left out)."""
    path = Path(folder) / "run.toml"
    write_atomic(path, tomli_w.dumps(_without_none(config)).encode())
    return path


def write_provenance(
    folder: Path, *, command: Sequence[str] | None = None, facts: Mapping[str, Any] | None = None
) -> Path:
    """Write `provenance.json`: what `provenance` says, and the caller's facts."""
    record = {**provenance(sys.argv if command is None else command), "facts": dict(facts or {})}
    path = Path(folder) / "provenance.json"
    write_atomic(path, (json.dumps(record, indent=1, sort_keys=True) + "\n").encode())
    return path


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """What a result must carry to be had again: the command, the versions, the time (UTC)."""
    return {
        "command": list(command),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {"megatron-spd": megatron_spd.__version__, **_versions()},
    }


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in RECORDED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _without_none(value: Any) -> Any:
    """TOML has no null: drop the fields that hold none, at every level."""
    if isinstance(value, Mapping):
        return {str(key): _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value if item is not None]
    return str(value) if isinstance(value, Path) else value
