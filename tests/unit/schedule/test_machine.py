"""The machine alone. The picture below is the one of `schedule/machine.py`, letter for letter."""

import random

import pytest

from megatron_spd.errors import ScheduleError
from megatron_spd.schedule import machine as machine_module
from megatron_spd.schedule.machine import Machine
from megatron_spd.schedule.simulate import simulate
from megatron_spd.schedule.trace import Action, CycleRecord, grid, validate_trace

PICTURE = """
    cycle  stage0  stage1  stage2  draft  commit
      0      0       .       .       1      .      filling
      1      1       0       .       2      .
      2      2       1       0       3      1
      3      3       2       1       4      2
      4      4       3       2       5      3*     target chose another token for 3
      5      3*      .       .       4      .      refilling behind 3*
"""


def rows_of(picture: str) -> list[list[str]]:
    return [line.split()[:6] for line in picture.strip().splitlines()]


def always(token: int) -> int:
    return token


def never(token: int) -> int:
    return -7


def test_the_picture_stands_in_the_docstring() -> None:
    assert PICTURE.strip("\n") in (machine_module.__doc__ or "")


def test_the_picture_is_a_run() -> None:
    wrong_once = iter([1, 2, -3, 4, 5, 4, 5, 6, 7, 8, 9])
    result = simulate(3, 5, target=lambda p: p, drafter=lambda p: next(wrong_once))
    assert rows_of(grid(result.trace))[:7] == rows_of(PICTURE)
    assert result.tokens == (0, 1, 2, 3, 4, 5)
    validate_trace(result.trace)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5, 8, 16])
def test_cycles_of_an_oracle_and_of_an_always_wrong_drafter(num_stages: int) -> None:
    oracle = simulate(num_stages, 32, target=always, drafter=always).counters
    wrong = simulate(num_stages, 32, target=always, drafter=never).counters
    assert (oracle.cycles, oracle.accepted, oracle.rejected) == (32 + num_stages - 1, 32, 0)
    assert (wrong.cycles, wrong.accepted, wrong.rejected) == (32 * num_stages, 0, 32)


def test_without_drafts_nothing_is_judged() -> None:
    result = simulate(4, 10, target=always, drafter=lambda p: None)
    assert result.counters.cycles == 40
    assert result.counters.accepted + result.counters.rejected + result.counters.flushed == 0
    validate_trace(result.trace)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_any_drafter_gives_the_targets_text_and_eal_follows_acceptance(
    num_stages: int, seed: int
) -> None:
    rng = random.Random(seed)
    result = simulate(
        num_stages, 60, target=always, drafter=lambda p: p if rng.random() < 0.7 else -1
    )
    assert result.tokens == tuple(range(61))
    validate_trace(result.trace)
    counters = result.counters
    assert counters.accepted + counters.rejected == counters.committed == 60
    expected = counters.accepted + num_stages * counters.rejected
    assert 0 <= counters.cycles - expected <= num_stages - 1


def test_every_draft_is_counted_once() -> None:
    proposed: list[int] = []

    def drafter(position: int) -> int:
        if position <= 20:  # later ones lie past the request's limit and are not taken
            proposed.append(position)
        return position if position % 4 else -1

    counters = simulate(3, 20, target=always, drafter=drafter).counters
    assert counters.accepted + counters.rejected + counters.flushed == len(proposed)


def test_prompt_enters_in_chunks_and_yields_one_free_token() -> None:
    machine = Machine(2, 32, chunk_tokens=4)
    machine.admit(7, list(range(10)), limit=20)
    sizes = []
    commits = []
    for _ in range(6):
        due = machine.wave_due()
        if due is not None:
            commits += machine.answer([100] * len(due.nodes))
        wave = machine.emit()
        sizes.append(len(wave.nodes) if wave else 0)
    assert sizes == [4, 4, 2, 0, 1, 0]
    assert [(c.position, c.accepted) for c in commits] == [(10, None)]
    assert machine.requests[7].counters.committed == 0


@pytest.mark.parametrize("cancel_at", range(1, 9))
def test_cancel_at_any_cycle_gives_every_row_back(cancel_at: int) -> None:
    machine = Machine(3, 64, chunk_tokens=4)
    machine.admit(0, list(range(6)), limit=40)
    for cycle in range(cancel_at + 4):
        due = machine.wave_due()
        if due is not None:
            machine.answer([n.position + 1 for n in due.nodes])
        if cycle == cancel_at:
            machine.finish(0)
        machine.emit()
        if 0 in machine.requests and machine.requests[0].first_wave is not None:
            machine.propose(machine.path(0)[-1], machine.path(0)[-1].position + 1)
        machine.check_integrity()
    assert machine.rows.num_free == 64
    assert not machine.busy


def test_an_answer_of_the_wrong_size_is_refused() -> None:
    machine = Machine(1, 8)
    with pytest.raises(ScheduleError, match="no wave due"):
        machine.answer([1])
    machine.admit(0, [1, 2], limit=4)
    machine.emit()
    with pytest.raises(ScheduleError, match="2 tokens due at cycle 1, got 1 tokens"):
        machine.answer([1])


def test_rows_run_out_with_a_clear_error() -> None:
    machine = Machine(1, 2)
    machine.admit(0, [1, 2, 3], limit=4)
    with pytest.raises(ScheduleError, match="all 2 KV rows"):
        machine.emit()


@pytest.mark.parametrize("text", ["2F17", "D18", "V16", "R17"])
def test_actions_round_trip(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["F17", "2D3", "2F", "X1", ""])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        Action.parse(text)


def test_a_broken_trace_shows_its_row() -> None:
    good = list(simulate(3, 6, target=always, drafter=always).trace)
    bad = list(good)
    bad[3] = CycleRecord(
        forwards=(("3",), ("9",), ("1",)), drafts=bad[3].drafts, commits=bad[3].commits
    )
    with pytest.raises(ScheduleError) as caught:
        validate_trace(bad)
    assert "stage 1 forwards position 9" in str(caught.value)
    row = next(line for line in str(caught.value).splitlines() if "<-- here" in line)
    assert row.split()[0] == "3"
    bad = list(good)
    bad[4] = CycleRecord(forwards=bad[4].forwards, drafts=bad[4].drafts, commits=("5",))
    with pytest.raises(ScheduleError, match="position 5 commits after position 2"):
        validate_trace(bad)
