"""A log gets few lines, each with the time left as it is measured."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megatron_spd.cli import progress as module


def lines(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[float, int]]) -> list[str]:
    clock = iter([0.0, *(at for at, _ in calls)])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    sink = io.StringIO()
    with module.progress("work", 100, Console(file=sink, width=200)) as advance:
        for _, done in calls:
            advance(done, "well")
    return sink.getvalue().splitlines()


def test_the_time_left_follows_from_what_was_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lines(monkeypatch, [(0.0, 0), (20.0, 50), (25.0, 60), (40.0, 100)])
    assert found == [
        "work 0/100, 0 s, eta unknown  well",
        "work 50/100, 20 s, eta 20 s  well",
        "work 100/100, 40 s, eta 0 s  well",
    ]


def test_work_done_before_does_not_count_as_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(monkeypatch, [(2.0, 51), (20.0, 60)])[1] == "work 60/100, 20 s, eta 80 s  well"
