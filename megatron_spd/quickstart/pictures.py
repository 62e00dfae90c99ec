"""Two pictures of a run: the training curves, and what each stage did in each cycle."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_spd.checkpoint.atomic import write_atomic

FATES = ("prompt", "corrected", "accepted", "rejected", "flushed")
"""What becomes of a node; of a wave's several nodes the first of these is drawn."""
EMPTY = "empty"
COLOURS = {
    "prompt": "#9aa5b1",
    "accepted": "#2e8b57",
    "corrected": "#2f6db5",
    "rejected": "#d1495b",
    "flushed": "#edae49",
    EMPTY: "#f4f4f4",
}
MEANINGS = {
    "prompt": "prompt",
    "accepted": "draft, accepted",
    "corrected": "the target's own token",
    "rejected": "draft, rejected",
    "flushed": "behind a rejected draft",
    EMPTY: "empty (bubble)",
}
CYCLES_A_BAND = 48
MAX_BANDS = 4
SMOOTHED_OVER_STEPS = 10
DPI = 130


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one stage forwards in one cycle."""

    position: int
    """Of the wave's first node."""
    fate: str


def timeline_grid(timeline: Mapping[str, Any]) -> list[list[Cell | None]]:
    """grid[stage][cycle], None where the stage has nothing to do.

    The wave that enters at cycle c is at stage s in cycle c + s. Cycle 0 is the first one named.
    """
    stages, waves = int(timeline["num_stages"]), list(timeline["waves"])
    waves = [wave for wave in waves if wave["nodes"]]
    if not waves:
        return [[] for _ in range(stages)]
    first = min(wave["cycle"] for wave in waves)
    length = max(wave["cycle"] for wave in waves) - first + stages
    grid: list[list[Cell | None]] = [[None] * length for _ in range(stages)]
    for wave in waves:
        node = min(wave["nodes"], key=lambda item: FATES.index(item["fate"]))
        cell = Cell(position=int(node["position"]), fate=str(node["fate"]))
        for stage in range(stages):
            grid[stage][wave["cycle"] - first + stage] = cell
    return grid


def count_fates(grid: Sequence[Sequence[Cell | None]]) -> dict[str, int]:
    """Stage-cycles by what became of them; the sum is stages times cycles."""
    counts = dict.fromkeys((*FATES, EMPTY), 0)
    for row in grid:
        for cell in row:
            counts[EMPTY if cell is None else cell.fate] += 1
    return counts


def draw_timeline(timeline: Mapping[str, Any], path: Path) -> None:
    """The stages by cycles of one text as a PNG, the first 192 cycles of it."""
    grid = timeline_grid(timeline)
    length = max((len(row) for row in grid), default=0)
    starts = range(0, max(length, 1), CYCLES_A_BAND)[:MAX_BANDS]
    figure = Figure(figsize=(15, len(starts) * (0.34 * len(grid) + 0.75) + 0.9))
    panels = figure.subplots(len(starts), 1, squeeze=False)[:, 0]
    for start, panel in zip(starts, panels, strict=True):
        _draw_band(panel, grid, start)
    panels[-1].set_xlabel("cycle; the number in a cell is the position of its token")
    shown = min(length, CYCLES_A_BAND * MAX_BANDS)
    panels[0].set_title(
        f"What each stage forwards in each cycle: first prompt, cycles 0 to {max(shown - 1, 0)} "
        f"of {length}"
    )
    keys = [
        Patch(facecolor=COLOURS[fate], edgecolor="#999999", label=MEANINGS[fate])
        for fate in (*FATES, EMPTY)
    ]
    figure.legend(handles=keys, loc="lower center", ncols=len(keys), frameon=False)
    figure.tight_layout(rect=(0, 0.5 / figure.get_figheight(), 1, 1))
    _save(figure, path)


def _draw_band(axes: Axes, grid: Sequence[Sequence[Cell | None]], start: int) -> None:
    for stage, row in enumerate(grid):
        for cycle in range(start, min(start + CYCLES_A_BAND, len(row))):
            cell = row[cycle]
            colour = COLOURS[EMPTY if cell is None else cell.fate]
            axes.broken_barh(
                [(cycle - 0.5, 1)],
                (stage - 0.5, 1),
                facecolor=colour,
                edgecolor="white",
                linewidth=0.8,
            )
            if cell is not None:
                axes.text(
                    cycle,
                    stage,
                    str(cell.position),
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color="white",
                )
    axes.set_xlim(start - 0.5, start + CYCLES_A_BAND - 0.5)
    axes.set_ylim(len(grid) - 0.5, -0.5)
    axes.set_yticks(range(len(grid)), [f"stage {stage}" for stage in range(len(grid))])
    axes.set_xticks(range(start, start + CYCLES_A_BAND, 4))
    axes.spines[:].set_visible(False)


def draw_training(
    joint: Sequence[Mapping[str, Any]], distil: Sequence[Mapping[str, Any]], path: Path
) -> None:
    """Loss and agreement of both runs, from the lines of their metrics.jsonl, as a PNG."""
    figure = Figure(figsize=(12, 4.2))
    left, right = figure.subplots(1, 2)
    _draw_run(
        left,
        joint,
        "Target and module together, 2 stages",
        {
            "target_loss": ("target's loss, nats a token", "#333333"),
            "loss": ("module's loss", "#d1495b"),
        },
    )
    _draw_run(
        right,
        distil,
        "Module alone, on text the target wrote",
        {
            "loss": ("module's loss", "#d1495b"),
        },
    )
    figure.tight_layout()
    _save(figure, path)


def _draw_run(
    axes: Axes,
    metrics: Sequence[Mapping[str, Any]],
    title: str,
    losses: Mapping[str, tuple[str, str]],
) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    for field, (label, colour) in losses.items():
        _draw_curve(axes, metrics, field, label, colour)
    shares = axes.twinx()
    shares.set_ylabel("agreement")
    shares.set_ylim(0, 1)
    _draw_curve(shares, metrics, "agreement", "agreement with the target", "#2f6db5")
    axes.set_ylim(bottom=0)
    lines = [*axes.get_lines(), *shares.get_lines()]
    named = [line for line in lines if not str(line.get_label()).startswith("_")]
    if named:
        axes.legend(handles=named, loc="upper center", frameon=False, fontsize=8)


def _draw_curve(
    axes: Axes, metrics: Sequence[Mapping[str, Any]], field: str, label: str, colour: str
) -> None:
    """Each step faintly, and its running mean."""
    points = [(line["step"], line[field]) for line in metrics if line.get(field) is not None]
    if not points:
        return
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(steps, running_mean(values, SMOOTHED_OVER_STEPS), color=colour, label=label)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window` - 1 before it."""
    return [
        sum(values[max(0, end - window) : end]) / min(end, window)
        for end in range(1, len(values) + 1)
    ]


def _save(figure: Figure, path: Path) -> None:
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=DPI)
    write_atomic(path, sink.getvalue())
