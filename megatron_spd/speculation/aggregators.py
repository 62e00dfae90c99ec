"""From the taps known of a position to one vector of width H.

A type is a distinct set of known taps. Only the types that the plan can reach are built: two depths
that know the same taps share one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_spd.errors import ConfigError
from megatron_spd.stage_plan import StagePlan


def known_counts(plan: StagePlan) -> list[int]:
    """How many taps (a prefix of `plan.taps`) each type knows, in type order."""
    counts = {
        plan.type_of(depth): len(plan.taps_known_at(depth)) for depth in range(plan.num_stages + 1)
    }
    return [counts[kind] for kind in range(plan.num_types)]


class Aggregator(nn.Module):
    """Base: `forward(taps, kind)` maps [..., T, H] to [..., H], reading only the known taps."""

    def __init__(self, counts: list[int], hidden_size: int) -> None:
        super().__init__()
        self.counts = counts
        self.hidden_size = hidden_size


class ConcatAggregator(Aggregator):
    """One bias-free linear a type over the concatenation of its taps (the published form)."""

    def __init__(self, counts: list[int], hidden_size: int) -> None:
        super().__init__(counts, hidden_size)
        self.projections = nn.ModuleList(
            nn.Linear(count * hidden_size, hidden_size, bias=False) for count in counts
        )

    def forward(self, taps: Tensor, kind: int) -> Tensor:
        """Taps [..., T, H] of a type to [..., H]."""
        known = taps[..., : self.counts[kind], :].flatten(-2)
        result: Tensor = self.projections[kind](known)
        return result


class SharedAggregator(Aggregator):
    """One [H, H] block a tap, summed over the known taps, plus a learned vector a type."""

    def __init__(self, counts: list[int], hidden_size: int) -> None:
        super().__init__(counts, hidden_size)
        self.blocks = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(max(counts))
        )
        self.type_vectors = nn.Parameter(torch.zeros(len(counts), hidden_size))

    def forward(self, taps: Tensor, kind: int) -> Tensor:
        """Taps [..., T, H] of a type to [..., H]."""
        result: Tensor = self.type_vectors[kind].expand(*taps.shape[:-2], -1)
        for index in range(self.counts[kind]):
            result = result + self.blocks[index](taps[..., index, :])
        return result


class AttentionAggregator(Aggregator):
    """A learned query a type over the known taps; values through one [H, H] block a tap."""

    def __init__(self, counts: list[int], hidden_size: int) -> None:
        super().__init__(counts, hidden_size)
        self.blocks = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(max(counts))
        )
        self.tap_keys = nn.Parameter(torch.zeros(max(counts), hidden_size))
        self.queries = nn.Parameter(torch.randn(len(counts), hidden_size) * hidden_size**-0.5)

    def forward(self, taps: Tensor, kind: int) -> Tensor:
        """Taps [..., T, H] of a type to [..., H]."""
        count = self.counts[kind]
        known = taps[..., :count, :]
        keys = F.rms_norm(known, (self.hidden_size,)) + self.tap_keys[:count]
        scores = (keys @ self.queries[kind]).float()
        weights = scores.softmax(-1).to(taps.dtype)
        values = torch.stack([self.blocks[i](known[..., i, :]) for i in range(count)], -2)
        return (weights.unsqueeze(-1) * values).sum(-2)


_KINDS: dict[str, type[Aggregator]] = {
    "concat": ConcatAggregator,
    "shared": SharedAggregator,
    "attention": AttentionAggregator,
}


def build_aggregator(name: str, plan: StagePlan, hidden_size: int) -> Aggregator:
    """The aggregator of that name for the plan's reachable types.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in _KINDS:
        raise ConfigError(f"aggregator {name!r} is not one of {', '.join(_KINDS)}")
    return _KINDS[name](known_counts(plan), hidden_size)
