"""Prompt files: what is read, and what is refused with its line."""

from pathlib import Path

import pytest

from megatron_spd.cli.prompts import read_prompts
from megatron_spd.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_first_turns_in_order_and_no_more_than_asked(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"question_id": 7, "turns": ["a\u2028b", "later"]}\n'
        '\n{"turns": ["c"]}\n{"turns": ["d"]}\n',
    )
    assert [(p.question_id, p.text) for p in read_prompts(path)] == [
        ("7", "a\u2028b"),
        ("3", "c"),
        ("4", "d"),
    ]
    assert [p.text for p in read_prompts(path, 2)] == ["a\u2028b", "c"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no prompt"),
        ("\n  \n", "holds no prompt"),
        ('{"turns": ["a"]}\n{"turns": ', 'line 2: not valid JSON .* got {"turns": '),
        ('{"text": "a"}', 'line 1: expected an object with "turns".* got {"text": "a"}'),
        ('{"turns": []}', "line 1: expected an object"),
        ('{"turns": [5]}', "line 1: expected an object"),
        ("[1]", "line 1: expected an object"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_prompts(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the prompts .*nowhere"):
        read_prompts(tmp_path / "nowhere.jsonl")
