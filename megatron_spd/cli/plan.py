"""`megatron-spd plan`: what each rank would hold, from a target's config.json alone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_spd.config import PlanConfig
from megatron_spd.errors import ConfigError
from megatron_spd.stage_plan import StagePlan
from megatron_spd.target_spec import TargetSpec

_BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One stage of a plan as the user sees it."""

    stage: int
    """Number of the stage."""
    rank: int
    """The rank that runs it."""
    module: bool
    """Whether the speculation module runs on that rank too."""
    layers: tuple[int, int]
    """Its layers [lo, hi)."""
    taps: tuple[int, ...]
    """The boundaries it sends to the module."""
    parameter_bytes: int
    """Bytes of the target's weights on it, in the target's dtype."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan, its target and one row a stage."""

    plan: StagePlan
    """The plan."""
    target: str
    """Folder of the target."""
    rows: tuple[StageRow, ...]
    """One row a stage."""

    def to_json(self) -> str:
        """The report as one indented JSON object."""
        facts = {
            "target": self.target,
            "plan": json.loads(self.plan.to_json()),
            "fingerprint": self.plan.fingerprint,
            "world_size": self.plan.world_size,
            "megatron_layout": self.plan.megatron_layout(),
            "stages": [asdict(row) for row in self.rows],
        }
        return json.dumps(facts, indent=2)

    def to_table(self) -> Table:
        """The report as a table for a terminal."""
        plan = self.plan
        table = Table(
            title=f"{self.target}: {plan.num_layers} layers, {plan.num_stages} stages",
            caption=f"ranks {plan.world_size}  plan {plan.fingerprint}  {plan.megatron_layout()}",
        )
        for heading in ("stage", "rank", "layers", "taps", "weights, bytes"):
            table.add_column(heading, justify="right")
        for row in self.rows:
            rank = f"{row.rank} + module" if row.module else str(row.rank)
            layers = f"[{row.layers[0]}, {row.layers[1]})"
            taps = " ".join(map(str, row.taps)) or "-"
            # no markup: "[0, 9)" must not read as a style
            cells = (str(row.stage), rank, layers, taps, f"{row.parameter_bytes:,}")
            table.add_row(*(cell.replace("[", r"\[") for cell in cells))
        if plan.module_rank not in plan.stage_ranks:
            table.add_row("-", f"{plan.module_rank} module", "-", "-", "-")
        return table


def stage_parameter_bytes(spec: TargetSpec, plan: StagePlan, stage: int) -> int:
    """Bytes of the target's weights that a stage holds, before any tensor-parallel split.

    The first stage has the embedding, the last the final norm and the output projection; a tied
    target on one stage shares the two, on several each end has its copy.
    """
    hidden, heads = spec.hidden_size, spec.num_heads * spec.head_dim
    attention = 2 * hidden * heads + 2 * hidden * spec.num_kv_heads * spec.head_dim
    layer = attention + 3 * hidden * spec.intermediate_size + 2 * hidden
    count = layer * len(plan.layers_of(stage))
    first, last = stage == 0, stage == plan.num_stages - 1
    if first:
        count += spec.vocab_size * hidden
    if last:
        count += hidden
        if not (first and spec.tied):
            count += spec.vocab_size * hidden
    return count * _BYTES_OF_DTYPE[spec.dtype]


def read_target_spec(folder: str | Path) -> TargetSpec:
    """The facts of a target from its config.json and generation_config.json; opens no weights.

    Raises:
        ConfigError: config.json is missing, damaged or of an architecture that is not supported.
    """
    config_path = Path(folder) / "config.json"
    if not config_path.is_file():
        raise ConfigError(f"{config_path} does not exist; plan.target must be a model folder")
    generation_path = Path(folder) / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else None
    return TargetSpec.from_hf(_read_json(config_path), generation)


def make_report(config: PlanConfig) -> PlanReport:
    """The report of a plan.

    Raises:
        ConfigError: the target's folder or the plan's bounds do not fit.
        PlanError: the plan is not consistent.
    """
    spec = read_target_spec(config.target)
    plan = config.build(spec.num_layers)
    rows = []
    for stage in range(plan.num_stages):
        layers = plan.layers_of(stage)
        rank = plan.stage_ranks[stage]
        rows.append(
            StageRow(
                stage=stage,
                rank=rank,
                module=plan.roles_of(rank).module,
                layers=(layers.start, layers.stop),
                taps=plan.taps_of(stage),
                parameter_bytes=stage_parameter_bytes(spec, plan, stage),
            )
        )
    return PlanReport(plan=plan, target=config.target, rows=tuple(rows))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold one JSON object, got a {type(value).__name__}")
    return value
