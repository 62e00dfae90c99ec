"""ModuleConfig: the shape and the rules of a speculation module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron_spd.errors import ConfigError, listing
from megatron_spd.stage_plan import StagePlan
from megatron_spd.target_spec import RopeSpec, TargetSpec, shape_problems

AGGREGATORS = ("concat", "shared", "attention")
HEADS = ("linear", "mlp")


@dataclass(frozen=True, kw_only=True)
class ModuleConfig:
    """What is needed to build a module; it travels in the artifact.

    Raises:
        ConfigError: one message with a bullet for each problem found.
    """

    hidden_size: int
    """Width H of the target's hidden state and of the module's."""
    num_layers: int
    """Decoder layers of the module."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; divides num_heads."""
    head_dim: int
    """Width of one head; even."""
    intermediate_size: int
    """Width of the MLP."""
    vocab_size: int
    """The target's vocabulary V."""
    norm_eps: float
    """Epsilon of every RMSNorm."""
    rope: RopeSpec
    """The target's rotary position embedding."""
    aggregator: str
    """How the known taps become one vector: concat, shared or attention."""
    head: str
    """linear, or mlp: a residual MLP before the linear."""
    draft_vocab_size: int
    """Rows Vd of the head; at most vocab_size."""
    bounds: tuple[int, ...]
    """Layer bounds of the plan it was built for."""
    taps: tuple[int, ...]
    """Boundaries it reads, ascending from 0."""

    def __post_init__(self) -> None:
        problems = shape_problems(self, "draft_vocab_size")
        if self.aggregator not in AGGREGATORS:
            problems.append(f"aggregator {self.aggregator!r} is not one of {AGGREGATORS}")
        if self.head not in HEADS:
            problems.append(f"head {self.head!r} is not one of {HEADS}")
        if self.draft_vocab_size > self.vocab_size:
            problems.append(
                f"draft_vocab_size ({self.draft_vocab_size}) exceeds vocab_size "
                f"({self.vocab_size}); lower it"
            )
        if problems:
            raise ConfigError(listing("the speculation module cannot be built", problems))

    @classmethod
    def for_target(
        cls,
        spec: TargetSpec,
        plan: StagePlan,
        *,
        num_layers: int = 1,
        aggregator: str = "shared",
        head: str = "linear",
        draft_vocab_size: int = 0,
    ) -> ModuleConfig:
        """A module over a plan with the target's widths; 0 drafts the whole vocabulary.

        Raises:
            ConfigError: values that cannot work.
        """
        return cls(
            hidden_size=spec.hidden_size,
            num_layers=num_layers,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            intermediate_size=spec.intermediate_size,
            vocab_size=spec.vocab_size,
            norm_eps=spec.norm_eps,
            rope=spec.rope,
            aggregator=aggregator,
            head=head,
            draft_vocab_size=draft_vocab_size or spec.vocab_size,
            bounds=plan.bounds,
            taps=plan.taps,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        values = asdict(self)
        values.update(bounds=list(self.bounds), taps=list(self.taps))
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModuleConfig:
        """The config a `to_dict` describes.

        Raises:
            ConfigError: unknown or missing fields, or values that cannot work.
        """
        known = {field.name for field in fields(cls)}
        unknown, missing = sorted(set(values) - known), sorted(known - set(values))
        if unknown or missing:
            raise ConfigError(f"not a module config: unknown {unknown}, missing {missing}")
        given = dict(values)
        given.update(bounds=tuple(given["bounds"]), taps=tuple(given["taps"]))
        if not isinstance(given["rope"], RopeSpec):
            try:
                given["rope"] = RopeSpec(**given["rope"])
            except TypeError as error:
                raise ConfigError(f"not a rope spec: {error}") from error
        return cls(**given)
