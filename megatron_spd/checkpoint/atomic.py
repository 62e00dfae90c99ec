"""Atomic writes: a reader sees the old file or the new one, never a part of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Write one file through a temporary neighbour and a rename.

    Raises:
        OSError: the folder cannot be written.
    """
    write_all_atomic({path: data})


def write_all_atomic(files: Mapping[Path, bytes]) -> None:
    """Write several files: all of them are on disk under temporary names before the first rename.

    Renames happen in the mapping's order. A failure before the first leaves every old file.

    Raises:
        OSError: a folder cannot be written; no temporary file is left.
    """
    waiting: list[tuple[Path, Path]] = []
    try:
        for path, data in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            waiting.append((Path(name), path))
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            Path(name).chmod(0o644)
        while waiting:
            temporary, path = waiting[0]
            temporary.replace(path)
            waiting.pop(0)
    finally:
        for temporary, _ in waiting:
            temporary.unlink(missing_ok=True)
