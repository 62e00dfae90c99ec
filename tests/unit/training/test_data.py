"""Packed rows: dense, pure in (seed, row), refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_spd.errors import ConfigError
from megatron_spd.training.data import PackedText, read_documents, seed_of


def documents() -> list[list[int]]:
    return [list(range(100 * k, 100 * k + size)) for k, size in enumerate((3, 20, 1, 9, 8), 1)]


def packed(seed: int = 0) -> PackedText:
    return PackedText(documents(), sequence_tokens=8, seed=seed)


def test_an_epoch_holds_every_token_once() -> None:
    text = packed()
    rows = text.rows(0, text.rows_per_epoch)
    seen = rows.tokens[rows.documents >= 0]
    assert sorted(seen.tolist()) == sorted(token for part in documents() for token in part)
    assert int((rows.documents < 0).sum()) == text.rows_per_epoch * 8 - text.num_tokens


def test_positions_restart_with_each_document_and_count_up() -> None:
    rows = packed().rows(0, 6)
    for tokens, positions, ids in zip(rows.tokens, rows.positions, rows.documents, strict=True):
        for document in range(int(ids.max()) + 1):
            here = ids == document
            assert positions[here].tolist() == list(range(int(here.sum())))
            assert (tokens[here].diff() == 1).all()


def test_a_row_does_not_depend_on_what_was_read_before() -> None:
    text = packed()
    late = text.rows(13, 1).tokens
    text.rows(0, 3)
    assert torch.equal(text.rows(12, 2).tokens[1:], late)
    assert torch.equal(packed().rows(13, 1).tokens, late)


def test_order_follows_seed_and_epoch() -> None:
    text = packed()
    per_epoch = text.rows_per_epoch
    assert not torch.equal(text.rows(0, per_epoch).tokens, text.rows(per_epoch, per_epoch).tokens)
    assert not torch.equal(text.rows(0, 5).tokens, packed(seed=1).rows(0, 5).tokens)
    assert text.fingerprint == packed().fingerprint != packed(seed=1).fingerprint


def test_seed_of_separates_its_parts() -> None:
    assert seed_of("fill", 1, 23) != seed_of("fill", 12, 3) != seed_of("order", 12, 3)
    assert 0 <= seed_of("fill", 0) < 2**63


def test_text_file_is_one_document_and_jsonl_one_a_line(tmp_path: Path) -> None:
    plain = tmp_path / "a.txt"
    plain.write_text("one\n\ntwo\n")
    assert [text.strip() for text in read_documents(plain)] == ["one\n\ntwo"]
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", " ", "two")))
    assert read_documents(lines) == ["one", "two"]
    text = PackedText.from_file(
        lines, lambda part: list(part.encode()), vocab_size=256, sequence_tokens=4, seed=0
    )
    assert text.num_tokens == 6


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file .*missing\.txt"):
        read_documents(tmp_path / "missing.txt")
    for name, content, message in [
        ("a.csv", "x", r"\.txt or \.jsonl"),
        ("e.jsonl", "", "is empty"),
        ("w.jsonl", " \n\n", "is empty"),
        ("f.jsonl", '{"ids": [1.5, 2]}\n', "whole numbers"),
        ("s.jsonl", '{"ids": ["a"]}\n', "whole numbers"),
        ("n.jsonl", '{"ids": [[1], [2]]}\n', "whole numbers"),
        ("i.jsonl", '{"ids": 5}\n', "whole numbers"),
        ("t.jsonl", '{"text": 5}\n', "must be a string"),
        ("m.jsonl", '{"ids": [1]}\n{"text": "x"}\n', 'line 2: "ids" is missing'),
        ("a.jsonl", '{"body": "x"}\n', '"text" or an "ids" field'),
        ("b.jsonl", "{", "not valid JSONL"),
        ("a.txt", "  \n", "holds no text"),
    ]:
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_documents(path)
    with pytest.raises(ConfigError, match="no tokens"):
        PackedText([[]], sequence_tokens=4, seed=0)


def test_ids_of_a_file_are_used_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    rows = [{"text": "unused", "ids": [5, 7, 7]}, {"text": "unused", "ids": [1]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_documents(path) == [[5, 7, 7], [1]]
    text = PackedText.from_file(path, list, vocab_size=8, sequence_tokens=4, seed=0)
    assert text.token_counts(8).tolist() == [0, 1, 0, 0, 0, 1, 0, 2]
    with pytest.raises(ConfigError, match=r"token ids 1\.\.7, the target's vocabulary is 0\.\.6"):
        PackedText.from_file(path, list, vocab_size=7, sequence_tokens=4, seed=0)
