"""What a user may set: plain frozen dataclasses, read from TOML and dotted command-line overrides.

A file has one table a class, `[plan]`, `[module]` and `[train]`; `--plan.num_stages=4` on the
command line wins over the file. Types are checked by jsonargparse against the dataclasses, values
by their `__post_init__`. An unknown table or key is refused by name.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from megatron_spd.errors import ConfigError
from megatron_spd.stage_plan import StagePlan

set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How the target is cut into stages: `num_stages` of even size, or explicit `bounds`.

    Raises:
        ConfigError: neither or both of `num_stages` and `bounds`.
    """

    target: str
    """Folder of the target in Hugging Face's layout; planning reads only its config.json."""
    num_stages: int = 0
    """Stages of even size; 0 when `bounds` says where to cut."""
    bounds: tuple[int, ...] = ()
    """Layer bounds such as [0, 9, 18, 27, 36]; empty for even stages."""
    taps: tuple[int, ...] = ()
    """Boundaries the speculation module reads; empty for all stage bounds."""
    module_own_rank: bool = False
    """Whether the speculation module gets a rank of its own instead of stage 0's."""

    def __post_init__(self) -> None:
        if self.num_stages < 0:
            raise ConfigError(f"plan.num_stages ({self.num_stages}) must be at least 1")
        if bool(self.num_stages) == bool(self.bounds):
            raise ConfigError(
                f"set one of plan.num_stages ({self.num_stages}) and plan.bounds "
                f"({list(self.bounds)}), not both or neither"
            )

    def build(self, num_layers: int) -> StagePlan:
        """The plan for a target of `num_layers` decoder layers.

        Raises:
            ConfigError: `bounds` end elsewhere than at the target's last layer.
            PlanError: the plan is not consistent in itself.
        """
        taps = self.taps or None
        if not self.bounds:
            return StagePlan.even(
                num_layers, self.num_stages, taps=taps, module_own_rank=self.module_own_rank
            )
        if self.bounds[-1] != num_layers:
            raise ConfigError(
                f"plan.bounds end at {self.bounds[-1]} but the target has {num_layers} layers"
            )
        return StagePlan.from_bounds(self.bounds, taps=taps, module_own_rank=self.module_own_rank)


@dataclass(frozen=True, kw_only=True)
class ModuleOptions:
    """The shape of a new speculation module; its widths are the target's."""

    num_layers: int = 1
    """Decoder layers in the speculation module."""
    aggregator: Literal["concat", "shared", "attention"] = "shared"
    """How the taps known at a depth become one vector."""
    head: Literal["linear", "mlp"] = "linear"
    """Linear, or a small residual MLP before the linear."""
    draft_vocab_size: int = 0
    """Tokens the module can draft; 0 for the target's whole vocabulary."""

    def __post_init__(self) -> None:
        _at_least("module", self, num_layers=1, draft_vocab_size=0)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """One training run of the speculation module.

    Raises:
        ConfigError: a number is out of its range.
    """

    data: str
    """Text to learn from: a .txt or .jsonl file."""
    output: str
    """Folder for checkpoints and the record of the run."""
    num_steps: int = 400
    """Optimizer steps."""
    num_micro_batches: int = 1
    """Micro-batches a step and a data-parallel copy."""
    micro_batch_size: int = 8
    """Packed rows in a micro-batch."""
    sequence_tokens: int = 256
    """Tokens in a packed row."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    num_warmup_steps: int = 20
    """Steps of linear warm-up before the cosine decay."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    gradient_clip: float = 1.0
    """Largest gradient norm over all ranks; 0 for no clipping."""
    loss: Literal["kl", "tv", "overlap", "blend"] = "blend"
    """Forward KL, total variation, negative log overlap, or KL and TV blended by acceptance."""
    zero_stage: Literal[1, 2] = 1
    """DeepSpeed's ZeRO stage."""
    joint: bool = False
    """Whether the target learns too, with its own language-model loss."""
    seed: int = 0
    """Seed of the initial weights, the order of the data and the fill of the pipeline."""
    save_every_steps: int = 100
    """Steps between checkpoints; the last step is always saved."""

    def __post_init__(self) -> None:
        _at_least(
            "train",
            self,
            num_steps=1,
            num_micro_batches=1,
            micro_batch_size=1,
            sequence_tokens=2,
            num_warmup_steps=0,
            weight_decay=0,
            gradient_clip=0,
            seed=0,
            save_every_steps=1,
        )
        if self.learning_rate <= 0:
            raise ConfigError(f"train.learning_rate ({self.learning_rate}) must be above 0")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What to continue and how; greedy unless a temperature is given.

    Raises:
        ConfigError: a number is out of its range.
    """

    prompt: str
    """Text to continue."""
    module: str = ""
    """Folder of a trained speculation module; empty decodes over the pipeline without drafts."""
    max_new_tokens: int = 128
    """Tokens to write at most, the first one included."""
    temperature: float = 0.0
    """0 is greedy; the text is a function of the seed at any temperature."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens up to this probability mass."""
    seed: int = 0
    """Seed of the noise the target chooses with."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; it is cut before the first of them."""

    def __post_init__(self) -> None:
        _at_least("generate", self, max_new_tokens=1, temperature=0, top_k=0, seed=0)


SECTIONS: dict[str, type[Any]] = {
    "plan": PlanConfig,
    "module": ModuleOptions,
    "train": TrainOptions,
    "generate": GenerateOptions,
}
"""The tables of a configuration file."""


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


def _at_least(section: str, options: object, **limits: float) -> None:
    for name, least in limits.items():
        if getattr(options, name) < least:
            raise ConfigError(
                f"{section}.{name} ({getattr(options, name)}) must be at least {least}"
            )
