"""Prompt files in the EAGLE form: a line a prompt, {"question_id": .., "turns": [..]}."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_spd.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One line of a prompt file."""

    question_id: str
    text: str
    """The first turn."""


def read_prompts(path: str | Path, num_prompts: int = 0) -> list[Prompt]:
    """The prompts of a .jsonl file, in its order; blank lines are passed over.

    A line without "question_id" is named by its number.

    Args:
        path: the file.
        num_prompts: use only the first so many; 0 uses all.

    Raises:
        ConfigError: no such file, no prompt in it, or a line that is not a prompt; with the line.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read the prompts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompts {path} are not UTF-8: {error}") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and not (num_prompts and len(prompts) == num_prompts):
            prompts.append(_prompt_of(f"{path}, line {number}", number, line))
    if not prompts:
        raise ConfigError(
            f'{path} holds no prompt; expected lines {{"question_id": .., "turns": [..]}}'
        )
    return prompts


def _prompt_of(where: str, number: int, line: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON ({error}), got {_short(line)}") from error
    turns = record.get("turns") if isinstance(record, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise ConfigError(
            f'{where}: expected an object with "turns", a list of texts, got {_short(line)}'
        )
    return Prompt(question_id=str(record.get("question_id", number)), text=turns[0])


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
