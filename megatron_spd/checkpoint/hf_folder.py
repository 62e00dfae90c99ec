"""A Hugging Face folder, checked whole from its headers before any weight is opened."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_spd.checkpoint.rules import HEAD, Shape, expected_shapes
from megatron_spd.errors import CheckpointError, listing
from megatron_spd.target_spec import TargetSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json")
HASHED_WHOLE_BYTES = 1024 * 1024
"""Tensors up to this size go into the hash whole, larger ones by `NUM_BLOCKS` blocks."""
NUM_BLOCKS, BLOCK_BYTES = 256, 4096
MAX_HEADER_BYTES = 100 * 1024 * 1024
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies, from a safetensors header."""

    file: Path
    shape: Shape
    dtype: str
    """safetensors' own name: F32, BF16, ..."""
    start: int
    """First byte in the file."""
    end: int
    """Byte behind the last."""


@dataclass(frozen=True, kw_only=True)
class FolderHashes:
    """What ties an artifact to one target folder."""

    weights: str
    tokenizer: str
    """Empty when the folder has no tokenizer."""


class HfFolder:
    """A target as Hugging Face stores it: config.json and safetensors, in one file or in shards.

    Raises:
        CheckpointError: a file is missing or has another size than its header says, a tensor is
            missing, unknown or of another shape than the config asks for, or dtypes are mixed.
        ConfigError: the config names something that is not supported.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path} is not a folder; expected a Hugging Face checkpoint"
            )
        self.config = read_json(self.path / "config.json")
        generation = self.path / "generation_config.json"
        spec = TargetSpec.from_hf(self.config, read_json(generation) if generation.exists() else {})
        entries = self._entries()
        _check_tensors(entries, spec, self.path)
        self._entry = {name: entries[name] for name in expected_shapes(spec)}
        self.dtype = _one_dtype(self._entry, self.path)
        self.spec = replace(spec, dtype=str(self.dtype).removeprefix("torch."))
        """The target; its dtype is that of the stored weights, whatever the config claims."""

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the target's tensors, sorted."""
        return tuple(sorted(self._entry))

    def read(self, name: str) -> Tensor:
        """One tensor in its stored dtype; nothing else of its file is read.

        Raises:
            CheckpointError: the folder has no such tensor.
        """
        if name not in self._entry:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        with safe_open(self._entry[name].file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def weights_hash(self) -> str:
        """16 hex digits over names, dtypes, shapes and values; sharding does not change it.

        Of a tensor above 1 MiB, 256 blocks of 4 KiB spread evenly from its first byte to its last:
        training or quantizing a target changes them, and 70B parameters hash in seconds.
        """
        return self._weights_hash

    def tokenizer_hash(self) -> str:
        """16 hex digits over the tokenizer's files; empty when there are none."""
        digest = hashlib.sha256()
        found = [self.path / name for name in TOKENIZER_FILES if (self.path / name).exists()]
        for file in found:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
        return digest.hexdigest()[:16] if found else ""

    def hashes(self) -> FolderHashes:
        """Both hashes."""
        return FolderHashes(weights=self.weights_hash(), tokenizer=self.tokenizer_hash())

    @cached_property
    def _weights_hash(self) -> str:
        digest = hashlib.sha256()
        for name in self.tensor_names:
            entry = self._entry[name]
            digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
            size = entry.end - entry.start
            whole = size <= HASHED_WHOLE_BYTES
            length = size if whole else BLOCK_BYTES
            with entry.file.open("rb") as stream:
                for block in range(1 if whole else NUM_BLOCKS):
                    stream.seek(entry.start + block * (size - length) // (NUM_BLOCKS - 1))
                    digest.update(stream.read(length))
        return digest.hexdigest()[:16]

    def _entries(self) -> dict[str, TensorEntry]:
        """Every tensor of every file; the index must agree with the files' own headers."""
        index = self.path / INDEX
        if not index.exists():
            return read_header(self.path / SINGLE)
        placed = read_json(index).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise CheckpointError(f"{index} has no weight_map")
        found: dict[str, TensorEntry] = {}
        for name in sorted(set(placed.values())):
            found.update(read_header(self.path / str(name)))
        for tensor, name in placed.items():
            if tensor not in found or found[tensor].file.name != name:
                raise CheckpointError(f"{index} places {tensor} in {name}, which does not hold it")
        return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing or is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors a safetensors file holds, after comparing its size with its header.

    Raises:
        CheckpointError: the file is missing, truncated, too long, or has no readable header.
    """
    if not path.exists():
        raise CheckpointError(f"{path} is missing; copy the folder again")
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > MAX_HEADER_BYTES or size < 8 + length:
            raise CheckpointError(
                f"{path} is truncated or not safetensors: expected a header of {length} bytes "
                f"behind 8, found {size} bytes"
            )
        raw = stream.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        found = {name: _entry_of(path, 8 + length, item) for name, item in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has no readable safetensors header: {error}") from error
    expected = max((entry.end for entry in found.values()), default=8 + length)
    if size != expected:
        raise CheckpointError(
            f"{path} is damaged: expected {expected} bytes from its header, found {size}; "
            "copy it again"
        )
    return found


def _entry_of(path: Path, base: int, item: dict[str, Any]) -> TensorEntry:
    start, end = item["data_offsets"]
    return TensorEntry(
        file=path,
        shape=tuple(int(size) for size in item["shape"]),
        dtype=str(item["dtype"]),
        start=base + int(start),
        end=base + int(end),
    )


def _check_tensors(entries: dict[str, TensorEntry], spec: TargetSpec, path: Path) -> None:
    """Every expected tensor with its shape, and no tensor that nobody would read."""
    expected = expected_shapes(spec)
    problems = [f"{name} is missing" for name in expected if name not in entries]
    for name, entry in entries.items():
        if name in expected:
            if entry.shape != expected[name]:
                problems.append(f"{name} should be {expected[name]}, found {entry.shape}")
        elif not (name.endswith("rotary_emb.inv_freq") or (spec.tied and name == HEAD)):
            problems.append(f"{name} belongs to no part of the target")
    if problems:
        shown = problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])
        raise CheckpointError(listing(f"{path} does not fit its config.json", shown))


def _one_dtype(entries: dict[str, TensorEntry], path: Path) -> torch.dtype:
    names = sorted({entry.dtype for entry in entries.values()})
    if len(names) != 1 or names[0] not in DTYPES:
        raise CheckpointError(
            f"{path} stores its weights as {', '.join(names)}; expected one of {', '.join(DTYPES)}"
        )
    return DTYPES[names[0]]
