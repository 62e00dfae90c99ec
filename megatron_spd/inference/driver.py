"""The driver: once a cycle it reads the answers, commits or rejects, emits, and drafts.

The order inside `cycle` is the design: the wave leaves before the module drafts, so that stages
and module work at the same time, and nothing else is waited for. A tree chooses which of its drafts
enter once the answers have come: few comparisons, which the stages wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_spd.errors import ScheduleError
from megatron_spd.inference.drafter import Drafter
from megatron_spd.inference.links import DriverLinks
from megatron_spd.inference.phases import PhaseClock
from megatron_spd.inference.requests import Request, Result, TextEnd
from megatron_spd.inference.timeline import Timeline
from megatron_spd.sampling import SamplingParams
from megatron_spd.schedule.machine import Machine, Wave
from megatron_spd.stage_plan import StagePlan
from megatron_spd.wave import WaveHeader


@dataclass(kw_only=True)
class _Open:
    """A request being decoded."""

    request: Request
    end: TextEnd
    started: float


class Driver:
    """Decodes requests over the stages of a plan.

    Args:
        plan: the stage plan.
        links: the driver's ends of the edges.
        drafter: proposes the next token each cycle.
        max_positions: the target's context length in tokens.
        decode: token ids -> text.
        num_rows: KV rows of every stage.
        chunk_tokens: prompt tokens a wave.
    """

    def __init__(
        self,
        *,
        plan: StagePlan,
        links: DriverLinks,
        drafter: Drafter,
        max_positions: int,
        decode: Callable[[Sequence[int]], str],
        num_rows: int,
        chunk_tokens: int,
    ) -> None:
        self.machine = Machine(plan.num_stages, num_rows, chunk_tokens=chunk_tokens)
        self.drafter = drafter
        self.timeline: Timeline | None = None
        self.phases: PhaseClock | None = None
        self._plan, self._links = plan, links
        self._max_positions, self._decode = max_positions, decode
        self._open: dict[int, _Open] = {}
        self._sampling: dict[int, SamplingParams] = {}
        self._waves: dict[int, Wave] = {}
        self._next_request = 0

    def run(self, request: Request) -> Result:
        """Decode one request to its end. What is in flight then drains behind the next one."""
        number = self._admit(request)
        while True:
            for finished, result in self.cycle():
                if finished == number:
                    return result

    def drain(self) -> None:
        """Run until nothing travels, so that the stages can be stopped."""
        while self.machine.busy:
            self.cycle()
        self.machine.check_integrity()

    def cycle(self) -> list[tuple[int, Result]]:
        """One cycle; returns the requests that ended in it."""
        self._mark("between")
        ended = self._judge()
        for number in self.machine.requests:
            self.drafter.enter(self.machine, number)
        self._mark("decide")
        wave, cycle = self.machine.emit(), self.machine.cycle - 1
        if wave is not None:
            self._waves[wave.number] = wave
            if self.timeline is not None:
                self.timeline.record(wave)
            self._links.emit(WaveHeader.of(wave, self._sampling))
        self._mark("emit")
        self._links.step_local(cycle)
        self._mark("stage")
        self._observe(cycle - 1)
        for number, _ in ended:
            # only now: the wave that ended the request has given its last taps
            self.drafter.forget(number)
        for number, state in self.machine.requests.items():
            if not state.prefilling:
                self.drafter.propose(self.machine, number, self._sampling[number])
        self._mark("draft")
        return ended

    def _mark(self, phase: str) -> None:
        if self.phases is not None:
            self.phases.mark(phase)

    def _admit(self, request: Request) -> int:
        limit = request.limit(self._max_positions)
        number, self._next_request = self._next_request, self._next_request + 1
        self.machine.admit(number, request.prompt_ids, limit=limit)
        end = TextEnd(request, limit, self._decode)
        self._open[number] = _Open(request=request, end=end, started=time.perf_counter())
        self._sampling[number] = request.sampling
        return number

    def _judge(self) -> list[tuple[int, Result]]:
        wave = self.machine.wave_due()
        tokens = None if wave is None else self._links.tokens(wave.number)
        if self.phases is not None:
            self.phases.turn(self.machine.cycle)
        if tokens is None:
            return []
        ended: list[tuple[int, Result]] = []
        commits = self.machine.answer(tokens)
        if self.timeline is not None:
            self.timeline.commit(commits)
        for commit in commits:
            current = self._open[commit.request]
            if current.end.add(commit.token):
                ended.append((commit.request, self._finish(commit.request, current)))
        return ended

    def _finish(self, number: int, current: _Open) -> Result:
        if current.end.reason is None:
            raise ScheduleError(f"request {number} ended without a reason")
        del self._open[number], self._sampling[number]
        return Result(
            ids=tuple(current.end.ids),
            text=current.end.text(),
            finish_reason=current.end.reason,
            counters=self.machine.finish(number),
            seconds=time.perf_counter() - current.started,
            num_stages=self._plan.num_stages,
        )

    def _observe(self, cycle: int) -> None:
        """Read the taps that the stages produced in a cycle that is over."""
        for stage in range(self._plan.num_stages):
            wave = self._waves.get(cycle - stage)
            if wave is None:
                continue
            taps = self._links.taps(wave.number, stage)
            self._mark("taps")
            self.drafter.observe(wave.nodes, stage, taps)
            self._mark("observe")
            if stage == self._plan.num_stages - 1:
                del self._waves[wave.number]
                self._links.forget(wave.number)
