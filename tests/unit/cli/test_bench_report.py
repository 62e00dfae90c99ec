"""The figures of `bench cycle` from times that were made up."""

import json
from typing import Any

import pytest
from rich.console import Console

from megatron_spd.__main__ import main
from megatron_spd.cli.bench_report import CycleReport, Spread, TimedText, findings, phase_means
from megatron_spd.inference.phases import PHASES, CycleTimes
from megatron_spd.inference.requests import Result
from megatron_spd.schedule.machine import Counters


def cycle_of(seconds: float) -> CycleTimes:
    phases = dict.fromkeys(PHASES, 0.0) | {"emit": 0.001, "answers": seconds - 0.001}
    return CycleTimes(
        number=0, started=0.0, cpu_started=0.0, seconds=seconds, cpu_seconds=0.0005, phases=phases
    )


def text_of(seconds: float, **counters: int) -> TimedText:
    counted = Counters(**counters)
    result = Result(
        ids=(0,) * (counted.committed + 1),
        text="",
        finish_reason="length",
        counters=counted,
        seconds=0.0,
        num_stages=4,
    )
    return TimedText(result=result, cycles=(cycle_of(seconds),) * counted.cycles)


@pytest.fixture
def facts() -> dict[str, Any]:
    drafted = text_of(0.021, accepted=15, rejected=5, flushed=9, committed=20, cycles=35)
    plain = text_of(0.020, committed=10, cycles=40)
    return findings(drafted, [plain, plain], [0.004] * 8, num_stages=4, num_edges=5, stage_ms=19.0)


def test_spread_of_times() -> None:
    spread = Spread.of([at / 1e3 for at in range(100, 0, -1)])
    assert (spread.mean, spread.median, spread.p95) == pytest.approx((50.5, 50.5, 95.0))
    assert Spread.of([0.002]).p95 == pytest.approx(2.0)


def test_phases_together_are_the_cycle() -> None:
    means = phase_means([cycle_of(0.02), cycle_of(0.04)])
    assert list(means) == list(PHASES)
    assert sum(means.values()) == pytest.approx(30.0)
    assert (means["emit"], means["answers"]) == pytest.approx((1.0, 29.0))


def test_figures(facts: dict[str, Any]) -> None:
    assert facts["hop_ms"] == pytest.approx(1.0)
    assert facts["edge_ms"] == pytest.approx(0.8)
    assert facts["stage_and_hop_share"] == pytest.approx(20 / 21)
    assert facts["token_ms"] == pytest.approx(35 * 21 / 20)
    assert facts["plain_token_ms"] == pytest.approx({"mean": 80, "median": 80, "p95": 80})
    assert facts["speed_up"] == pytest.approx(80 / 36.75)
    assert facts["eal"] == pytest.approx(4 * 20 / 35)
    assert facts["eal_theory"] == pytest.approx(4 / (4 * 0.25 + 0.75))
    assert facts["theory_share"] == pytest.approx(facts["speed_up"] / facts["eal_theory"])
    assert facts["driver_cpu_ms"] == pytest.approx(0.5)


def test_nothing_judged_has_no_theory() -> None:
    plain = text_of(0.020, committed=10, cycles=40)
    facts = findings(plain, [plain], [0.004], num_stages=4, num_edges=5, stage_ms=19.0)
    assert (facts["acceptance"], facts["eal_theory"], facts["theory_share"]) == (None,) * 3
    assert facts["speed_up"] == pytest.approx(1.0)


def test_report_as_table_and_as_json(facts: dict[str, Any]) -> None:
    options = {"num_stages": 4, "stage_ms": 19.0}
    report = CycleReport(
        facts={**facts, "options": options, "world_size": 5, "stage_measured_ms": 19.1}
    )
    console = Console(width=120)
    with console.capture() as captured:
        console.print(report.to_table())
    shown = captured.get()
    assert "21.000 / 21.000 / 21.000" in shown
    assert "100.0 % of the cycle" in shown
    assert all(name in shown for name in PHASES)
    assert json.loads(report.to_json())["cycles"] == 35


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["speed"], "unknown benchmark 'speed'; there is cycle"),
        (["cycle", "--bench.num_stages=0"], "bench.num_stages (0) must be at least 1"),
        (["cycle", "--bench.agreement=[0.8,0.9]"], "one candidate a cycle"),
        (["cycle", "--bench.agreement=[1.5]"], "1.5"),
        (["cycle", "--json", "/"], "name a file"),
    ],
)
def test_user_error_is_one_sentence_and_exit_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err and captured.err.count("\n") == 1


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["bench", "--help"], ["bench", "cycle", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
    assert "Milliseconds a stage takes" in capsys.readouterr().out
