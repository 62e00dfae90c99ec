"""Text for training: files of documents, packed rows, and an order that is a pure function.

Row r of a run is the same tokens for the same (documents, sequence_tokens, seed), wherever the run
was stopped and resumed: there is no iterator to save, only the number of rows already consumed.
"""

from __future__ import annotations

import hashlib
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import datasets
import torch
from torch import Tensor

from megatron_spd.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Rows of packed documents, each tensor int64 [B, S]."""

    tokens: Tensor
    """Token ids; 0 where there is padding."""
    positions: Tensor
    """Index of the token in its piece of a document, from 0."""
    documents: Tensor
    """Which document of the row the token belongs to, from 0; -1 is padding."""


def seed_of(*parts: object) -> int:
    """A 63-bit seed from named parts, for example ("fill", seed, step): no state to carry."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def read_documents(path: str | Path) -> list[str | list[int]]:
    """The non-empty documents of a .txt file (the whole file is one) or of a .jsonl file.

    A .jsonl file has "text" or, for what a target wrote itself, "ids": token ids, used as they
    are because text need not tokenize back to the ids it came from.

    Raises:
        ConfigError: no such file, another ending, neither field, or nothing but blank text.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"train.data: no such file {path}")
    datasets.disable_progress_bars()  # every rank reads the file, and would draw bars of its own
    with tempfile.TemporaryDirectory() as cache:
        if path.suffix == ".txt":
            rows = datasets.Dataset.from_text(
                str(path), cache_dir=cache, keep_in_memory=True, sample_by="document"
            )
        elif path.suffix == ".jsonl":
            if not path.read_bytes().strip():
                raise ConfigError(f"train.data: {path} is empty")
            try:
                rows = datasets.Dataset.from_json(str(path), cache_dir=cache, keep_in_memory=True)
            except (datasets.exceptions.DatasetGenerationError, ValueError, TypeError) as error:
                raise ConfigError(f"train.data: {path} is not valid JSONL") from error
        else:
            raise ConfigError(f"train.data: {path} must end in .txt or .jsonl")
        found = _documents(path, rows)
    if not found:
        raise ConfigError(f"train.data: {path} holds no text")
    return found


def _documents(path: Path, rows: datasets.Dataset) -> list[str | list[int]]:
    """The documents of a table, its columns checked: one kind, of the right type, in every line."""
    name = next((name for name in ("ids", "text") if name in rows.column_names), None)
    if name is None:
        raise ConfigError(
            f'train.data: {path} needs a "text" or an "ids" field a line, it has '
            f"{rows.column_names}"
        )
    kind = rows.features[name]
    element = getattr(kind, "feature", None) if name == "ids" else kind
    wanted = "a list of whole numbers" if name == "ids" else "a string"
    dtype = str(getattr(element, "dtype", ""))
    if not dtype.startswith("int" if name == "ids" else "string"):
        raise ConfigError(
            f'train.data: {path}: "{name}" must be {wanted} in every line, it is {kind}'
        )
    values = list(rows[name])
    if None in values:
        raise ConfigError(
            f'train.data: {path}, line {values.index(None) + 1}: "{name}" is missing; every line '
            f"needs {wanted} there when one has it"
        )
    return [value for value in values if (value.strip() if name == "text" else value)]


class PackedText:
    """Documents cut into pieces of at most a row, shuffled anew each epoch and packed densely.

    A piece that reaches the end of its row goes on in the next one as a document of its own,
    so only the last row of an epoch has padding and every epoch has the same number of rows.

    Raises:
        ConfigError: no tokens at all.
    """

    def __init__(
        self, documents: Sequence[Sequence[int]], *, sequence_tokens: int, seed: int
    ) -> None:
        self.sequence_tokens = sequence_tokens
        self.seed = seed
        self._pieces = [
            torch.tensor(document[start : start + sequence_tokens], dtype=torch.int64)
            for document in documents
            for start in range(0, len(document), sequence_tokens)
        ]
        self.num_tokens = sum(len(piece) for piece in self._pieces)
        if not self.num_tokens:
            raise ConfigError("train.data holds no tokens")
        self._epoch = -1
        self._order: list[int] = []
        self._ends: list[int] = []

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        encode: Callable[[str], Sequence[int]],
        *,
        vocab_size: int,
        sequence_tokens: int,
        seed: int,
    ) -> PackedText:
        """The documents of a file; `encode` adds whatever special tokens a text gets.

        Raises:
            ConfigError: see `read_documents`; or token ids outside the vocabulary.
        """
        documents: list[Sequence[int]] = [
            encode(document) if isinstance(document, str) else document
            for document in read_documents(path)
        ]
        largest = max(max(document) for document in documents if document)
        smallest = min(min(document) for document in documents if document)
        if smallest < 0 or largest >= vocab_size:
            raise ConfigError(
                f"train.data: {path} has token ids {smallest}..{largest}, the target's "
                f"vocabulary is 0..{vocab_size - 1}; it was written with another tokenizer"
            )
        return cls(documents, sequence_tokens=sequence_tokens, seed=seed)

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often each token occurs, int64 [vocab_size]."""
        return sum(
            (torch.bincount(piece, minlength=vocab_size) for piece in self._pieces),
            start=torch.zeros(vocab_size, dtype=torch.int64),
        )

    @property
    def rows_per_epoch(self) -> int:
        """Packed rows in which every token appears once."""
        return -(-self.num_tokens // self.sequence_tokens)

    @property
    def fingerprint(self) -> str:
        """16 hex digits over tokens, row size and seed: a resumed run must see the same data."""
        digest = hashlib.sha256(repr((self.sequence_tokens, self.seed)).encode())
        for piece in self._pieces:
            digest.update(len(piece).to_bytes(4, "big"))
            digest.update(piece.numpy().tobytes())
        return digest.hexdigest()[:16]

    def rows(self, first: int, count: int) -> PackedRows:
        """Rows `first` .. `first + count - 1` of the endless run, [count, sequence_tokens]."""
        packed = [
            self._row(*divmod(row, self.rows_per_epoch)) for row in range(first, first + count)
        ]
        tokens, positions, documents = (torch.stack(part) for part in zip(*packed, strict=True))
        return PackedRows(tokens=tokens, positions=positions, documents=documents)

    def _enter_epoch(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        generator = torch.Generator().manual_seed(seed_of("order", self.seed, epoch))
        self._order = torch.randperm(len(self._pieces), generator=generator).tolist()
        self._ends = list(accumulate(len(self._pieces[piece]) for piece in self._order))
        self._epoch = epoch

    def _row(self, epoch: int, index: int) -> tuple[Tensor, Tensor, Tensor]:
        self._enter_epoch(epoch)
        size = self.sequence_tokens
        start, end = index * size, min((index + 1) * size, self.num_tokens)
        tokens = torch.zeros(size, dtype=torch.int64)
        positions = torch.zeros(size, dtype=torch.int64)
        documents = torch.full((size,), -1, dtype=torch.int64)
        at, document = start, 0
        slot = bisect_right(self._ends, start)
        while at < end:
            piece = self._pieces[self._order[slot]]
            offset = at - (self._ends[slot] - len(piece))
            taken = min(len(piece) - offset, end - at)
            here = slice(at - start, at - start + taken)
            tokens[here] = piece[offset : offset + taken]
            positions[here] = torch.arange(taken)
            documents[here] = document
            at, slot, document = at + taken, slot + 1, document + 1
        return tokens, positions, documents
