"""From TOML files and dotted command-line overrides to the dataclasses of `options.py`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from megatron_spd.config.options import SECTIONS
from megatron_spd.errors import ConfigError

set_parsing_settings(docstring_parse_attribute_docstrings=True)


def add_sections(parser: ArgumentParser, sections: Sequence[str]) -> None:
    """Gives a parser the dotted options of some `SECTIONS`."""
    for section in sections:
        parser.add_class_arguments(SECTIONS[section], section, as_group=False)


def read_toml(path: str | Path, sections: Sequence[str]) -> list[str]:
    """The values of a file's `sections`, written as the overrides that would set them.

    Every table is checked against `SECTIONS`, also those that this command does not read.

    Raises:
        ConfigError: the file cannot be read, or has an unknown table or key.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    arguments: list[str] = []
    for section, table in tables.items():
        _check_keys(path, section, table)
        if section in sections:
            arguments += [f"--{section}.{key}={_as_text(table[key])}" for key in table]
    return arguments


def parse_options(parser: ArgumentParser, arguments: Sequence[str], sections: Sequence[str]) -> Any:
    """The namespace of a parser after `add_sections`, each section being its dataclass.

    Raises:
        ConfigError: an unknown or missing option, or a value of the wrong type or range.
    """
    try:
        parsed = parser.parse_args(list(arguments))
    except ArgumentError as error:
        raise ConfigError(_one_line(error)) from error
    for section in sections:
        parsed[section] = SECTIONS[section](**vars(parsed[section]))
    return parsed


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), sections: Sequence[str] = ("plan",)
) -> Any:
    """A namespace with one dataclass a section: the file's values, then the overrides.

    Args:
        path: a TOML file, or None for overrides alone.
        overrides: dotted options such as `--plan.num_stages=4`.
        sections: the tables to build.

    Raises:
        ConfigError: see `read_toml` and `parse_options`.
    """
    parser = ArgumentParser(exit_on_error=False)
    add_sections(parser, sections)
    file_arguments = [] if path is None else read_toml(path, sections)
    return parse_options(parser, [*file_arguments, *overrides], sections)


def _check_keys(path: str | Path, section: str, table: object) -> None:
    if section not in SECTIONS or not isinstance(table, Mapping):
        raise ConfigError(
            f"{path}: unknown entry {section!r}; the tables are {', '.join(SECTIONS)}"
        )
    known = [field.name for field in fields(SECTIONS[section])]
    unknown = [key for key in table if key not in known]
    if unknown:
        raise ConfigError(
            f"{path}: unknown key {section}.{unknown[0]}; [{section}] has {', '.join(known)}"
        )


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
