"""Text that every machine has: the sources of the running interpreter's standard library."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_spd.checkpoint.atomic import write_all_atomic
from megatron_spd.errors import ConfigError

# Not the library, its tests, or tables rather than code.
LEFT_OUT = frozenset(
    ("site-packages", "test", "tests", "idle_test", "lib2to3", "idlelib", "encodings", "pydoc_data")
)
MIN_FILE_BYTES = 2000
OPENING_CHARACTERS = 200
MAX_OPENING_CHARACTERS = 320
"""An opening that finds no line's end before this many characters is not used."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents to learn from, and openings of documents that are not among them."""

    documents: tuple[str, ...]
    """Whole files."""
    openings: tuple[str, ...]
    """Openings of places inside the documents, for the target to continue."""
    held_out: tuple[str, ...]
    """Openings of files that are not among the documents."""

    def write(self, folder: Path) -> None:
        """Writes train.jsonl ({"text"} a line), openings.jsonl and prompts.jsonl (EAGLE form)."""
        write_all_atomic(
            {
                folder / "train.jsonl": _lines([{"text": text} for text in self.documents]),
                folder / "openings.jsonl": _lines(_questions(self.openings)),
                folder / "prompts.jsonl": _lines(_questions(self.held_out)),
            }
        )


def standard_library() -> Path:
    """The folder of the running interpreter's library."""
    return Path(sysconfig.get_path("stdlib"))


def make_corpus(
    root: Path, *, num_bytes: int, num_held_out: int, num_openings: int, seed: int
) -> Corpus:
    """A sample of the .py files below `root`, the same for the same files and seed.

    Args:
        num_bytes: documents are added until they hold this many bytes, or no file is left.
        num_held_out: files kept out of the documents, whose openings are the prompts.
        num_openings: openings taken from inside the documents.

    Raises:
        ConfigError: too few readable files.
    """
    held_out: list[str] = []
    documents: list[str] = []
    size = 0
    for path in _shuffled(root, seed):
        text = _read(path)
        if text is None:
            continue
        opening = opening_of(text)
        if len(held_out) < num_held_out:
            if opening:
                held_out.append(opening)
        elif size < num_bytes:
            documents.append(text)
            size += len(text.encode())
    if len(held_out) < num_held_out or not documents:
        raise ConfigError(
            f"{root} has too few Python sources: {num_held_out} to hold out and at least one to "
            f"learn from are needed, {len(held_out) + len(documents)} were found; install the "
            "interpreter with its library's sources"
        )
    return Corpus(
        documents=tuple(documents),
        openings=tuple(_inner_openings(documents, num_openings, seed)),
        held_out=tuple(held_out),
    )


def opening_of(text: str) -> str:
    """The first lines of a text, up to the line that reaches 200 characters; "" if there is none.

    It ends behind a line, so that a continuation starts where a line starts.
    """
    end = text.find("\n", OPENING_CHARACTERS - 1) + 1
    return text[:end] if 0 < end <= MAX_OPENING_CHARACTERS else ""


def _inner_openings(documents: Sequence[str], count: int, seed: int) -> list[str]:
    """Openings of the documents from a line somewhere inside them, the documents in turn."""
    found: list[str] = []
    for attempt in range(4 * count):
        if len(found) == count:
            break
        text = documents[attempt % len(documents)]
        start = text.find("\n", _number(seed, "opening", attempt) % len(text)) + 1
        opening = opening_of(text[start:].lstrip("\n"))
        if opening.strip():
            found.append(opening)
    return found


def _shuffled(root: Path, seed: int) -> list[Path]:
    """The .py files below a folder that are not left out, in the seed's order."""
    named = [(path.relative_to(root), path) for path in root.rglob("*.py")]
    kept = [
        (name.as_posix(), path) for name, path in named if not LEFT_OUT.intersection(name.parts)
    ]
    return [path for _, path in sorted(kept, key=lambda item: _number(seed, item[0]))]


def _read(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return text if len(text.encode()) >= MIN_FILE_BYTES else None


def _number(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def _questions(texts: Sequence[str]) -> list[dict[str, object]]:
    return [
        {"question_id": index, "category": "code", "turns": [text]}
        for index, text in enumerate(texts)
    ]


def _lines(records: Sequence[dict[str, object]] | Sequence[dict[str, str]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()
