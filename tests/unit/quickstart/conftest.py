"""A made-up run: figures that nobody measured, in the files' real form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

FATES = ("accepted", "accepted", "rejected", "flushed", "corrected", "accepted")


def timeline() -> dict[str, Any]:
    """Two stages; a prompt of three tokens at cycle 0, then six nodes, none at cycle 3."""
    prompt = [{"position": position, "fate": "prompt"} for position in range(3)]
    waves: list[dict[str, Any]] = [{"cycle": 0, "nodes": prompt}]
    for index, fate in enumerate(FATES):
        cycle = 1 + index + (index >= 2)
        waves.append({"cycle": cycle, "nodes": [{"position": 3 + index, "fate": fate}]})
    return {"num_stages": 2, "waves": waves}


def evaluation() -> dict[str, Any]:
    results = [
        {"question_id": 0, "ids": [5, 6, 7], "text": "def f", "seconds": 0.5},
        {"question_id": 1, "ids": [8, 9], "text": "a [b] c", "seconds": 0.25},
    ]
    return {
        "command": ["megatron-spd", "eval"],
        "plan": {"bounds": [0, 4, 8]},
        "num_prompts": 2,
        "accepted": 3,
        "rejected": 1,
        "flushed": 2,
        "committed": 3,
        "cycles": 5,
        "acceptance": 0.75,
        "interval": [0.3, 0.95],
        "agreement": 0.74,
        "agreement_judged": 4,
        "eal": 1.2,
        "eal_theory": 1.6,
        "seconds": 0.75,
        "tokens_per_second": 6.7,
        "results": results,
        "ranks": [
            {
                "rank": rank,
                "stage": rank,
                "module": rank == 0,
                "layers": [4 * rank, 4 * rank + 4],
                "waves": 9,
                "nodes": 12,
                "busy_seconds": 0.5,
            }
            for rank in range(2)
        ],
        "timeline": timeline(),
    }


def plain() -> dict[str, Any]:
    results = [{"ids": [5, 6, 7], "seconds": 0.1}, {"ids": [8, 9], "seconds": 0.15}]
    return {"results": results, "threads": 1}


def metrics(steps: int, *, joint: bool) -> list[dict[str, Any]]:
    lines = []
    for step in range(1, steps + 1):
        line = {"step": step, "loss": 4 / step, "agreement": step / (steps + 1)}
        lines.append({**line, "target_loss": 7 - step / steps} if joint else line)
    return lines


@pytest.fixture
def made_up() -> SimpleNamespace:
    """The functions above."""
    return SimpleNamespace(timeline=timeline, evaluation=evaluation, plain=plain, metrics=metrics)
