"""StagePlan: the one owner of layer arithmetic.

Every question of the form "which layers, which boundary, which rank" is answered here and nowhere
else. The plan is frozen, pure Python, travels in every checkpoint as JSON, and ranks compare its
fingerprint when they meet.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megatron_spd.errors import PlanError, listing


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What one rank runs."""

    stage: int | None
    """The stage it runs, or None for a rank that has only the module."""
    module: bool
    """Whether the speculation module (and the driver) lives on it."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """How a target of `bounds[-1]` decoder layers is cut, tapped and placed.

    Raises:
        PlanError: one message with a bullet for each problem found.
    """

    bounds: tuple[int, ...]
    """Layer bounds: stage s holds layers [bounds[s], bounds[s + 1]). Uneven is the normal case."""
    taps: tuple[int, ...]
    """Boundaries the module reads, ascending; the first is 0, the embedding output."""
    stage_ranks: tuple[int, ...]
    """stage_ranks[s] is the rank that runs stage s."""
    module_rank: int
    """The module's rank; it may be a stage's rank (world size n) or one of its own (n + 1)."""
    tensor_parallel_size: int = 1
    """Ranks that share one stage's matrices."""
    data_parallel_size: int = 1
    """Copies of the whole pipeline."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise PlanError(listing("the stage plan is not consistent", problems))

    def _problems(self) -> list[str]:
        found: list[str] = []
        bounds, taps = self.bounds, self.taps
        if len(bounds) < 2 or bounds[0] != 0:
            found.append(f"bounds must start at 0 and name at least one stage, got {bounds}")
        if any(hi <= lo for lo, hi in zip(bounds, bounds[1:], strict=False)):
            found.append(f"bounds must rise, every stage needs a layer, got {bounds}")
        if not taps or taps[0] != 0 or list(taps) != sorted(set(taps)):
            found.append(f"taps must ascend from 0 without repeats, got {taps}")
        if bounds and any(tap > bounds[-1] for tap in taps):
            found.append(f"taps {taps} reach past the last boundary {bounds[-1]}")
        if len(self.stage_ranks) != len(bounds) - 1:
            found.append(f"{len(bounds) - 1} stages but {len(self.stage_ranks)} stage ranks")
        ranks = {*self.stage_ranks, self.module_rank}
        if len(set(self.stage_ranks)) != len(self.stage_ranks) or ranks != set(range(len(ranks))):
            found.append(
                f"ranks must be 0..{len(ranks) - 1}, one stage each, got stages on "
                f"{self.stage_ranks} and the module on {self.module_rank}"
            )
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                found.append(f"{name} must be at least 1, got {getattr(self, name)}")
        return found

    @classmethod
    def from_bounds(
        cls,
        bounds: Sequence[int],
        *,
        taps: Sequence[int] | None = None,
        module_own_rank: bool = False,
    ) -> StagePlan:
        """Stage s on rank s; the module beside stage 0, or on rank n with `module_own_rank`."""
        num_stages = len(bounds) - 1
        return cls(
            bounds=tuple(bounds),
            taps=tuple(bounds if taps is None else taps),
            stage_ranks=tuple(range(num_stages)),
            module_rank=num_stages if module_own_rank else 0,
        )

    @classmethod
    def even(
        cls,
        num_layers: int,
        num_stages: int,
        *,
        taps: Sequence[int] | None = None,
        module_own_rank: bool = False,
    ) -> StagePlan:
        """Stages of equal size; the first ones take one more layer when it does not divide."""
        if not 1 <= num_stages <= num_layers:
            raise PlanError(
                f"{num_layers} layers cannot fill {num_stages} stages; "
                f"choose 1 to {num_layers} stages"
            )
        small, extra = divmod(num_layers, num_stages)
        bounds = [0]
        for stage in range(num_stages):
            bounds.append(bounds[-1] + small + (stage < extra))
        return cls.from_bounds(bounds, taps=taps, module_own_rank=module_own_rank)

    @property
    def num_stages(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_layers(self) -> int:
        return self.bounds[-1]

    @property
    def world_size(self) -> int:
        """Ranks a launch needs: pipeline (and the module's own) times tensor times data."""
        ranks = len({*self.stage_ranks, self.module_rank})
        return ranks * self.tensor_parallel_size * self.data_parallel_size

    @property
    def fingerprint(self) -> str:
        """16 hex digits over every field."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @property
    def num_types(self) -> int:
        """How many different sets of known taps a position can have over its depths."""
        return self.type_of(self.num_stages) + 1

    def layers_of(self, stage: int) -> range:
        """Target layers of a stage."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def stage_of_layer(self, layer: int) -> int:
        """The stage that holds a target layer."""
        if not 0 <= layer < self.num_layers:
            raise PlanError(f"layer {layer} is outside the target's {self.num_layers} layers")
        return bisect_right(self.bounds, layer) - 1

    def taps_of(self, stage: int) -> tuple[int, ...]:
        """Taps that a stage produces: boundaries b with lo < b <= hi.

        Boundary 0 is nobody's: the module's rank has its own copy of the embedding, because a
        draft reads the newest token before any stage has seen it.
        """
        lo, hi = self.bounds[stage], self.bounds[stage + 1]
        return tuple(tap for tap in self.taps if lo < tap <= hi)

    def taps_known_at(self, depth: int) -> tuple[int, ...]:
        """Taps known of a position that has completed `depth` stages."""
        return tuple(tap for tap in self.taps if tap <= self.bounds[depth])

    def type_of(self, depth: int) -> int:
        """Dense index of the set of taps known at a depth; depth 0 has type 0."""
        sizes = sorted({len(self.taps_known_at(d)) for d in range(self.num_stages + 1)})
        return sizes.index(len(self.taps_known_at(depth)))

    def roles_of(self, rank: int) -> Roles:
        """What a rank runs.

        Raises:
            PlanError: the rank is not in the plan.
        """
        stage = self.stage_ranks.index(rank) if rank in self.stage_ranks else None
        if stage is None and rank != self.module_rank:
            raise PlanError(f"rank {rank} has no role in a plan of {self.world_size} ranks")
        return Roles(stage=stage, module=rank == self.module_rank)

    def megatron_layout(self) -> str:
        """Megatron-core's `pipeline_model_parallel_layout`: E embedding, t layer, L loss."""
        stages = ["t" * len(self.layers_of(stage)) for stage in range(self.num_stages)]
        return "E" + "|".join(stages) + "L"

    def to_json(self) -> str:
        """One line with sorted keys; the same plan gives the same bytes."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> StagePlan:
        """The plan a `to_json` text describes.

        Raises:
            PlanError: unknown or missing fields, or an inconsistent plan.
        """
        fields = json.loads(text)
        for name in ("bounds", "taps", "stage_ranks"):
            if isinstance(fields.get(name), list):
                fields[name] = tuple(fields[name])
        try:
            return cls(**fields)
        except TypeError as error:
            raise PlanError(f"not a stage plan: {error}") from error
