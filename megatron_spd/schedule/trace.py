"""A run of the schedule as text: actions that parse back, a grid to read, rules to check."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_spd.errors import ScheduleError

_ACTION = re.compile(r"(?:(\d+)F|([DVR]))(\d+)")


@dataclass(frozen=True)
class Action:
    """One thing that happens in a cycle.

    Text form, which `parse` reads back: `2F17` stage 2 forwards position 17; `D18` the module
    drafts position 18; `V16` the target's choice for 16 is known; `R17` a repair for 17 enters.
    """

    kind: str
    position: int
    stage: int | None = None

    def __str__(self) -> str:
        return f"{'' if self.stage is None else self.stage}{self.kind}{self.position}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action of a text form.

        Raises:
            ScheduleError: the text is no action.
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(f"expected an action such as 2F17, D18, V16 or R17, got {text!r}")
        stage, kind, position = match.groups()
        if stage is not None:
            return cls("F", int(position), int(stage))
        return cls(kind, int(position))


@dataclass(frozen=True, kw_only=True)
class CycleRecord:
    """What happened in one cycle. A position with a star is one the target chose itself."""

    forwards: tuple[tuple[str, ...], ...]
    """For each stage the live positions it forwarded, such as ("3*",)."""
    drafts: tuple[str, ...] = ()
    commits: tuple[str, ...] = ()

    def actions(self) -> list[Action]:
        """The cycle's actions: forwards by stage, drafts, verdicts."""
        found = [
            Action("F", _number(cell), stage)
            for stage, cells in enumerate(self.forwards)
            for cell in cells
        ]
        found += [Action("D", _number(cell)) for cell in self.drafts]
        return found + [Action("V", _number(cell)) for cell in self.commits]


def _number(cell: str) -> int:
    return int(cell.rstrip("*"))


def grid(trace: Sequence[CycleRecord], bad_cycle: int | None = None) -> str:
    """The table of `schedule/machine.py`, with `<-- here` on one row when asked."""
    num_stages = len(trace[0].forwards) if trace else 0
    heads = [f"stage{stage}" for stage in range(num_stages)]
    lines = ["cycle  " + "".join(f"{head:<8}" for head in heads) + "draft  commit"]
    for cycle, record in enumerate(trace):
        cells = "".join(f"{'  ' + (','.join(c) or '.'):<8}" for c in record.forwards)
        draft, commit = ",".join(record.drafts) or ".", ",".join(record.commits) or "."
        line = f"{cycle:>3}    {cells}{'  ' + draft:<7}  {commit}"
        lines.append(line + ("   <-- here" if cycle == bad_cycle else ""))
    return "\n".join(lines)


def validate_trace(trace: Sequence[CycleRecord]) -> None:
    """Check that a trace could be a run.

    What a stage forwards, the stage before it forwarded a cycle earlier; what enters stage 0 was
    drafted or chosen in the cycle before; commits are contiguous, and each follows from the last
    stage having forwarded the position before it in the same cycle.

    Raises:
        ScheduleError: its text is the grid with `<-- here` on the first row that breaks a rule.
    """
    committed: int | None = None
    for cycle, record in enumerate(trace):
        before = trace[cycle - 1] if cycle else None
        problem = _first_problem(record, before, committed)
        if problem is not None:
            raise ScheduleError(f"{problem}\n{grid(trace, cycle)}")
        if record.commits:
            committed = _number(record.commits[-1])


def _first_problem(
    record: CycleRecord, before: CycleRecord | None, committed: int | None
) -> str | None:
    for stage, cells in enumerate(record.forwards):
        if before is None:
            known = cells if stage == 0 else ()
        elif stage == 0:
            known = before.drafts + before.commits
        else:
            known = before.forwards[stage - 1]
        for cell in cells:
            if cell not in known:
                return f"stage {stage} forwards position {cell}, which did not come to it"
    last = {_number(cell) for cell in record.forwards[-1]}
    for cell in record.commits:
        if committed is not None and _number(cell) != committed + 1:
            return f"position {cell} commits after position {committed}"
        if _number(cell) - 1 not in last:
            return f"position {cell} commits, but its predecessor has not left the last stage"
        committed = _number(cell)
    return None
