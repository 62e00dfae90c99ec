"""What a user may set: plain frozen dataclasses, read from TOML and dotted command-line overrides.

A file has one table a class, such as `[plan]`, `[module]` and `[train]`; `--plan.num_stages=4` on
the command line wins over the file. Types are checked by jsonargparse against the dataclasses,
values by their `__post_init__`. An unknown table or key is refused by name.
"""

from megatron_spd.config.options import (
    SECTIONS,
    EvalOptions,
    GenerateOptions,
    ModuleOptions,
    PlanConfig,
    RegenerateOptions,
    TrainOptions,
)
from megatron_spd.config.parse import add_sections, load_config, parse_options, read_toml
from megatron_spd.config.trials import BenchOptions, QuickstartOptions

__all__ = [
    "PlanConfig",
    "ModuleOptions",
    "TrainOptions",
    "GenerateOptions",
    "RegenerateOptions",
    "EvalOptions",
    "QuickstartOptions",
    "BenchOptions",
    "SECTIONS",
    "add_sections",
    "load_config",
    "parse_options",
    "read_toml",
]
