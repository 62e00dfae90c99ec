"""Progress of long work on standard error: a bar with ETA on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINES_EVERY_S = 10.0


class Advance(Protocol):
    """Called once a unit of work."""

    def __call__(self, done: int, note: str = "") -> None:
        """`done` units of the total are over; `note` says how it goes."""


@contextmanager
def progress(name: str, total: int, console: Console | None = None) -> Iterator[Advance]:
    """Shows how far `total` units of work have come while the block runs.

    A log file gets a line every 10 seconds, and the last one, each with the time left.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _lines(name, total, console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=total, note="")

        def advance(done: int, note: str = "") -> None:
            bar.update(task, completed=done, note=note)

        yield advance


def _lines(name: str, total: int, console: Console) -> Advance:
    started = time.monotonic()
    said = started - LINES_EVERY_S
    first: int | None = None

    def advance(done: int, note: str = "") -> None:
        nonlocal first, said
        now = time.monotonic()
        if first is None:
            # what was done before the first call, by a run that this one goes on with
            first = max(done - 1, 0)
        if done < total and now - said < LINES_EVERY_S:
            return
        said = now
        speed = (done - first) / (now - started) if now > started else 0.0
        eta = f"{(total - done) / speed:.0f} s" if speed else "unknown"
        text = f"{name} {done}/{total}, {now - started:.0f} s, eta {eta}"
        console.print(f"{text}  {note}".rstrip(), highlight=False, soft_wrap=True)

    return advance
