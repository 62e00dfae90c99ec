"""Where the driver's time goes: the phases of each cycle, read off one clock.

Nothing is waited for or sent to learn this. A cycle lasts from the arrival of one cycle's answers
to that of the next, so a text's cycles together last from its first token to its last one. The
phases follow each other without a gap: each mark closes the time since the one before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

PHASES = {
    "decide": "judge, commit or reject",
    "emit": "write and send the next wave",
    "stage": "forward the own stage, if any",
    "taps": "wait for the last cycle's taps",
    "observe": "hand them to the drafter",
    "draft": "propose what enters next",
    "between": "from one cycle to the next",
    "answers": "wait for the tokens",
}
"""Every phase of a cycle, in order, and what the driver does in it."""


@dataclass(kw_only=True)
class CycleTimes:
    """One cycle of the driver, in seconds."""

    number: int
    """The machine's cycle."""
    started: float
    cpu_started: float
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """CPU time of all threads of the driver's process."""
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


class PhaseClock:
    """Collects a driver's `CycleTimes`; set as its `phases` while it decodes."""

    def __init__(self) -> None:
        self._cycles: list[CycleTimes] = []
        self._open: CycleTimes | None = None
        self._last = 0.0

    def turn(self, cycle: int) -> None:
        """The answers that begin `cycle` are here: the cycle before ends, this one begins."""
        now, cpu = time.perf_counter(), time.process_time()
        if self._open is not None:
            self._open.phases["answers"] += now - self._last
            self._open.seconds = now - self._open.started
            self._open.cpu_seconds = cpu - self._open.cpu_started
            self._cycles.append(self._open)
        self._open, self._last = CycleTimes(number=cycle, started=now, cpu_started=cpu), now

    def mark(self, phase: str) -> None:
        """What was done since the last mark was `phase`, one of `PHASES`."""
        if self._open is None:
            return
        now = time.perf_counter()
        self._open.phases[phase] += now - self._last
        self._last = now

    def last(self, cycles: int) -> list[CycleTimes]:
        """The newest `cycles` whole cycles, oldest first."""
        return self._cycles[len(self._cycles) - cycles :]
