"""Atomic writes, provenance and tokenizers."""

import json
import tomllib
from pathlib import Path

import pytest

from megatron_spd.checkpoint import (
    Tokenizer,
    train_sentencepiece,
    write_all_atomic,
    write_atomic,
    write_provenance,
    write_run,
)
from megatron_spd.errors import CheckpointError


def test_a_failed_write_keeps_the_old_files(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"old")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError):
        write_all_atomic({tmp_path / "a": b"new", tmp_path / "file" / "b": b"new"})
    assert (tmp_path / "a").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file"]


def test_provenance(tmp_path: Path) -> None:
    write_run(tmp_path, {"steps": 3, "none": None, "plan": {"bounds": (0, 1), "at": Path("x")}})
    assert tomllib.loads((tmp_path / "run.toml").read_text()) == {
        "steps": 3,
        "plan": {"bounds": [0, 1], "at": "x"},
    }
    write_provenance(tmp_path, command=["convert"], facts={"hash": "ab"})
    record = json.loads((tmp_path / "provenance.json").read_text())
    assert record["command"] == ["convert"] and record["facts"] == {"hash": "ab"}
    assert "torch" in record["versions"]


def test_trained_tokenizer_round_trips(tmp_path: Path) -> None:
    texts = ["one two three\n", "def add(a, b): return a + b"] * 20
    train_sentencepiece(texts, tmp_path / "tokenizer.model", 300)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("two three: \u00e9")
    assert ids[0] == tokenizer.bos_id == 1 and tokenizer.vocab_size == 300
    assert tokenizer.decode(ids) == "two three: \u00e9"
    assert tokenizer.encode("two", bos=False) == tokenizer.encode("two")[1:]
    with pytest.raises(CheckpointError, match="100000"):
        train_sentencepiece(texts, tmp_path / "big.model", 100000)


def test_no_or_damaged_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="not a sentencepiece"):
        Tokenizer(tmp_path)


def test_both_kinds_agree(shared: Path, tmp_path: Path) -> None:
    source = shared / "models" / "stories260k"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    pieces, fast = Tokenizer(source), Tokenizer(tmp_path)
    text = "Once upon a time, there was a girl."
    assert pieces.encode(text) == fast.encode(text)
    assert fast.decode(fast.encode(text)).strip() == pieces.decode(pieces.encode(text)) == text
