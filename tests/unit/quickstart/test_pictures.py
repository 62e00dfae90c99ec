from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_spd.quickstart.pictures import (
    Cell,
    count_fates,
    draw_timeline,
    draw_training,
    running_mean,
    timeline_grid,
)

PNG = b"\x89PNG\r\n"


def test_grid_is_the_waves_moving_one_stage_a_cycle(made_up: SimpleNamespace) -> None:
    first, second = timeline_grid(made_up.timeline())
    fates = ["prompt", "accepted", "accepted", None, "rejected", "flushed", "corrected", "accepted"]
    assert [cell and cell.fate for cell in first] == [*fates, None]
    assert [cell and cell.fate for cell in second] == [None, *fates]
    assert first[1] == Cell(position=3, fate="accepted")
    assert first[0] == Cell(position=0, fate="prompt")


def test_grid_starts_at_the_first_wave() -> None:
    waves = [{"cycle": 7, "nodes": [{"position": 2, "fate": "accepted"}]}]
    grid = timeline_grid({"num_stages": 2, "waves": waves})
    cell = Cell(position=2, fate="accepted")
    assert grid == [[cell, None], [None, cell]]
    assert timeline_grid({"num_stages": 2, "waves": []}) == [[], []]


def test_fates_add_up_to_stages_times_cycles(made_up: SimpleNamespace) -> None:
    counts = count_fates(timeline_grid(made_up.timeline()))
    assert counts == {
        "prompt": 2,
        "accepted": 6,
        "corrected": 2,
        "rejected": 2,
        "flushed": 2,
        "empty": 4,
    }


def test_running_mean() -> None:
    assert running_mean([1, 3, 5, 7], 2) == [1, 2, 4, 6]
    assert running_mean([], 2) == []


@pytest.mark.parametrize("cycles", [0, 1, 60, 500])
def test_timeline_is_a_picture_at_any_length(tmp_path: Path, cycles: int) -> None:
    waves = [
        {"cycle": cycle, "nodes": [{"position": cycle, "fate": "accepted"}]}
        for cycle in range(cycles)
    ]
    draw_timeline({"num_stages": 4, "waves": waves}, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("steps", [0, 1, 40])
def test_training_is_a_picture_at_any_length(
    tmp_path: Path, steps: int, made_up: SimpleNamespace
) -> None:
    joint, distil = made_up.metrics(steps, joint=True), made_up.metrics(steps, joint=False)
    draw_training(joint, distil, tmp_path / "training.png")
    assert (tmp_path / "training.png").read_bytes().startswith(PNG)
