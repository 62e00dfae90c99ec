"""What `megatron-spd bench cycle` found: the figures from the raw times, as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from rich.table import Table

from megatron_spd.inference.phases import PHASES, CycleTimes
from megatron_spd.inference.requests import Result
from megatron_spd.schedule.theory import eal_of


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How times in milliseconds are spread."""

    mean: float
    median: float
    p95: float
    """The smallest time that at least 95 % of them do not exceed."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Of at least one time in seconds."""
        ordered = sorted(seconds)
        at = -(-95 * len(ordered) // 100) - 1
        return cls(mean=1e3 * fmean(ordered), median=1e3 * median(ordered), p95=1e3 * ordered[at])


@dataclass(frozen=True, kw_only=True)
class TimedText:
    """One decoded text and its cycles, from the first token to the last one."""

    result: Result
    cycles: tuple[CycleTimes, ...]

    @property
    def seconds(self) -> float:
        """The time of all cycles."""
        return sum(cycle.seconds for cycle in self.cycles)

    @property
    def tokens(self) -> int:
        """Tokens that these cycles wrote: all but the first."""
        return self.result.counters.committed

    def token_seconds(self) -> list[float]:
        """The time of each token of a text without drafts, where one takes n cycles."""
        stages = self.result.num_stages
        each = [cycle.seconds for cycle in self.cycles]
        return [sum(each[at : at + stages]) for at in range(0, len(each), stages)]


def phase_means(cycles: Sequence[CycleTimes]) -> dict[str, float]:
    """Mean milliseconds of each phase; together the mean cycle."""
    return {name: 1e3 * fmean(cycle.phases[name] for cycle in cycles) for name in PHASES}


def findings(
    drafted: TimedText,
    plain: Sequence[TimedText],
    ring: Sequence[float],
    *,
    num_stages: int,
    num_edges: int,
    stage_ms: float,
) -> dict[str, Any]:
    """All figures of one run.

    In n cycles a token passes n stages and once round the ring, so the least a cycle can take is a
    stage's time and 1/n of the ring's: that is the hop here. It is the median round's, which what
    else the machine does inflates least, while the cycle is the mean one.

    Args:
        drafted: the text with drafts.
        plain: the texts without, on the same ranks.
        ring: seconds of each round of a bare message over the same ranks.
        num_stages: n.
        num_edges: messages of a round.
        stage_ms: what each stage sleeps.
    """
    counters = drafted.result.counters
    acceptance = drafted.result.acceptance
    cycle, around = Spread.of([each.seconds for each in drafted.cycles]), Spread.of(ring)
    hop_ms = around.median / num_stages
    token_ms = 1e3 * drafted.seconds / drafted.tokens
    plain_token = Spread.of([seconds for text in plain for seconds in text.token_seconds()])
    speed_up = plain_token.mean / token_ms
    theory = None if acceptance is None else eal_of(acceptance, num_stages)
    return {
        "cycle_ms": asdict(cycle),
        "phases_ms": phase_means(drafted.cycles),
        "driver_cpu_ms": 1e3 * fmean(each.cpu_seconds for each in drafted.cycles),
        "ring_ms": {**asdict(around), "rounds": len(ring), "edges": num_edges},
        "edge_ms": around.median / num_edges,
        "hop_ms": hop_ms,
        "stage_and_hop_share": (stage_ms + hop_ms) / cycle.mean,
        **asdict(counters),
        "acceptance": acceptance,
        "eal": drafted.result.eal,
        "eal_theory": theory,
        "token_ms": token_ms,
        "plain_token_ms": asdict(plain_token),
        "speed_up": speed_up,
        "theory_share": None if theory is None else speed_up / theory,
    }


@dataclass(frozen=True, kw_only=True)
class CycleReport:
    """What `--json` writes, and the table of it."""

    facts: Mapping[str, Any]

    def to_json(self) -> str:
        """One indented JSON object."""
        return json.dumps(self.facts, indent=1) + "\n"

    def to_table(self) -> Table:
        """The figures for a terminal; times in milliseconds."""
        facts, options = self.facts, self.facts["options"]
        table = Table(
            title=f"{options['num_stages']} stages of {options['stage_ms']:g} ms, "
            f"{facts['world_size']} ranks, {facts['committed']} tokens",
            show_header=False,
        )
        cycle, ring = facts["cycle_ms"], facts["ring_ms"]
        rows = {
            "ms: mean / median / p95": "",
            "cycle": _spread(cycle),
            f"bare ring of {ring['edges']} messages": _spread(ring),
            "hop: median ring / stages": f"{facts['hop_ms']:.3f}",
            "(stage + hop) / cycle": f"{facts['stage_and_hop_share']:.3f}",
        }
        for name, value in facts["phases_ms"].items():
            rows[f"  {name}: {PHASES[name]}"] = f"{value:.3f}"
        total = sum(facts["phases_ms"].values())
        rows |= {
            "  all phases": f"{total:.3f}  {100 * total / cycle['mean']:.1f} % of the cycle",
            "driver's CPU time a cycle": f"{facts['driver_cpu_ms']:.3f}",
            "stage as measured, slowest rank": f"{facts['stage_measured_ms']:.3f}",
            "accepted, rejected, flushed": f"{facts['accepted']}, {facts['rejected']}, "
            f"{facts['flushed']}",
            "committed, cycles": f"{facts['committed']}, {facts['cycles']}",
            "acceptance": _shown(facts["acceptance"]),
            "EAL, theory": f"{_shown(facts['eal'])}, {_shown(facts['eal_theory'])}",
            "a token": f"{facts['token_ms']:.3f}",
            "a token without drafts": _spread(facts["plain_token_ms"]),
            "speed over no drafts": _shown(facts["speed_up"]),
            "share of the theory": _shown(facts["theory_share"]),
        }
        for name, value in rows.items():
            table.add_row(name, value)
        return table


def _spread(facts: Mapping[str, Any]) -> str:
    return f"{facts['mean']:.3f} / {facts['median']:.3f} / {facts['p95']:.3f}"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
