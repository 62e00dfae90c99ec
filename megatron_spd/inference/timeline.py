"""What a run looked like: the waves of a text with what became of their nodes, and a stage's work.

Neither is kept unless it is asked for; then it is a list in this process, no message.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from megatron_spd.inference.stage_worker import StageCompute, WaveResult
from megatron_spd.schedule.machine import Commit, Node, Wave
from megatron_spd.wave import WaveHeader


class Timeline:
    """The waves and commits of one text; set as a driver's `timeline` before it decodes the text.

    A draft that was judged before it entered, as on one stage, is in no wave.
    """

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.waves: list[Wave] = []
        self.commits: list[Commit] = []

    def record(self, wave: Wave) -> None:
        """A wave enters stage 0."""
        self.waves.append(wave)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Tokens became part of the text."""
        self.commits += commits

    @property
    def flags(self) -> list[bool]:
        """Whether each judged token had been drafted, in the order of the text."""
        return [commit.accepted for commit in self.commits if commit.accepted is not None]

    def fate(self, node: Node) -> str:
        """What became of a node: "prompt", "accepted", "corrected", "rejected" or "flushed".

        The token that prefill yields for free counts with the prompt. The text must be over.
        """
        if node.committed:
            if node.corrected:
                return "corrected"
            return "prompt" if node.position <= self.commits[0].position else "accepted"
        judged = node.position <= self.commits[-1].position
        of_the_text = node.parent is not None and node.parent.committed
        return "rejected" if judged and of_the_text else "flushed"

    def to_dict(self) -> dict[str, Any]:
        """The waves, cycles counted from the first; stage s forwards that of cycle c at c + s."""
        waves = [
            {
                "cycle": wave.number - self.waves[0].number,
                "nodes": [
                    {"position": node.position, "fate": self.fate(node)} for node in wave.nodes
                ],
            }
            for wave in self.waves
        ]
        return {"num_stages": self.num_stages, "waves": waves}


@dataclass(kw_only=True)
class StageWork:
    """What one rank's stage did, dead nodes included."""

    waves: int = 0
    nodes: int = 0
    busy_seconds: float = 0.0
    """Time inside `step`."""

    def to_dict(self) -> dict[str, Any]:
        """The three numbers."""
        return asdict(self)


class MeteredCompute:
    """A stage that counts what it does in `work`."""

    def __init__(self, compute: StageCompute) -> None:
        self._compute = compute
        self.work = StageWork()

    def step(self, header: WaveHeader, hidden: Tensor | None) -> WaveResult:
        """Forward one wave."""
        started = time.perf_counter()
        result = self._compute.step(header, hidden)
        self.work.busy_seconds += time.perf_counter() - started
        self.work.waves += 1
        self.work.nodes += header.num_nodes
        return result
