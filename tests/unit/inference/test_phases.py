import itertools
import time

import pytest

from megatron_spd.inference.phases import PHASES, PhaseClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> PhaseClock:
    """Each look at the wall clock is one second after the last; the CPU works half the time."""
    wall, cpu = itertools.count(10.0), itertools.count(0.0, 0.5)
    monkeypatch.setattr(time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(time, "process_time", lambda: next(cpu))
    return PhaseClock()


def test_phases_fill_each_cycle(clock: PhaseClock) -> None:
    clock.mark("draft")  # nothing is open yet
    for cycle in (5, 6, 7):
        clock.turn(cycle)
        for phase in ("decide", "emit", "taps", "observe", "taps", "observe", "draft"):
            clock.mark(phase)
    found = clock.last(2)
    assert [each.number for each in found] == [5, 6]
    for each in found:
        assert each.seconds == sum(each.phases.values()) == 8
        assert each.cpu_seconds == 0.5
        assert each.phases == dict.fromkeys(PHASES, 0.0) | {
            "decide": 1, "emit": 1, "taps": 2, "observe": 2, "draft": 1, "answers": 1
        }  # fmt: skip


def test_only_whole_cycles_are_given(clock: PhaseClock) -> None:
    clock.turn(0)
    assert clock.last(1) == []
    clock.turn(1)
    clock.turn(2)
    assert [each.number for each in clock.last(1)] == [1]
    assert clock.last(0) == []


def test_an_unknown_phase_is_an_error(clock: PhaseClock) -> None:
    clock.turn(0)
    with pytest.raises(KeyError):
        clock.mark("lunch")
