"""`bench cycle` over gloo ranks: its phases fill the cycle, and its counts are the schedule's."""

from typing import Any

import pytest

from megatron_spd.cli.bench_cycle import measure, script_of
from megatron_spd.config import BenchOptions
from megatron_spd.schedule.simulate import simulate
from megatron_spd.testing import run_ranks

OPTIONS = BenchOptions(
    num_stages=3,
    stage_ms=5.0,
    num_tokens=20,
    num_plain_tokens=3,
    num_hops=5,
    hidden_size=64,
    vocab_size=50,
)


def measured(rank: int, options: BenchOptions) -> dict[str, Any] | None:
    return measure(options)


@pytest.mark.parametrize("own_rank", [True, False])
def test_phases_fill_the_cycle_and_cycles_are_the_simulators(own_rank: bool) -> None:
    options = BenchOptions(**{**vars(OPTIONS), "module_own_rank": own_rank})
    facts = next(
        found for found in run_ranks(measured, 3 + own_rank, (options,)) if found is not None
    )
    script = script_of(options)
    counters = simulate(
        3,
        20,
        target=lambda position: script.token(position + 1),
        drafter=lambda position: script.candidates(position + 1)[0],
    ).counters
    assert facts["cycles"] == counters.cycles
    assert (facts["accepted"], facts["rejected"]) == (counters.accepted, counters.rejected)
    assert facts["committed"] == 20
    assert sum(facts["phases_ms"].values()) == pytest.approx(facts["cycle_ms"]["mean"], rel=0.05)
    assert (facts["phases_ms"]["stage"] > 4) is not own_rank
    # no cycle can be shorter than a stage, no token without drafts than all of them
    assert facts["cycle_ms"]["mean"] > 4.9 and facts["plain_token_ms"]["mean"] > 14.7
    assert facts["ring_ms"]["edges"] == 3 + own_rank and facts["ring_ms"]["rounds"] == 10
    assert facts["stage_measured_ms"] > 4.9
    assert facts["speed_up"] > 1
