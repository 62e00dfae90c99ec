"""The report of a run: one set of figures as a table, as JSON and as Markdown."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from megatron_spd.checkpoint.atomic import write_all_atomic
from megatron_spd.errors import SpdError
from megatron_spd.quickstart.pictures import EMPTY, MEANINGS, count_fates, timeline_grid
from megatron_spd.quickstart.steps import StepRecord

AVERAGED_STEPS = 10
"""A curve's start and end are means over so many steps."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The texts of the pipeline beside those of plain decoding, id by id."""

    prompts: int
    equal: int
    """Prompts whose ids are all the same."""
    tokens: int
    """Ids that plain decoding wrote."""
    differences: tuple[str, ...]
    """A sentence for each prompt that differs: where, and which ids."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that was measured, from the files the steps wrote."""

    comparison: Comparison
    evaluation: Mapping[str, Any]
    """What `megatron-spd eval --json` wrote."""
    plain: Mapping[str, Any]
    """{"results": [{"ids", "seconds"}], "threads"}: the same prompts decoded in one process."""
    curves: Mapping[str, tuple[float, float]]
    """Start and end of each training curve, by its label."""
    machine: Mapping[str, Any]
    """Cores and versions."""
    steps: tuple[StepRecord, ...]
    """The steps, with their commands and how long they took."""

    @property
    def plain_seconds(self) -> float:
        return sum(float(result["seconds"]) for result in self.plain["results"])

    @property
    def pipeline_seconds(self) -> float:
        return sum(float(result["seconds"]) for result in self.evaluation["results"])

    @property
    def num_stages(self) -> int:
        return len(self.evaluation["plan"]["bounds"]) - 1

    def figures(self) -> list[tuple[str, str]]:
        """The figures, a label and a value each."""
        return [
            *_text_figures(self.comparison),
            ("4-grams that repeat one of the same text", f"{self.repeated():.0%}"),
            *_draft_figures(self.evaluation),
            *_cycle_figures(self.evaluation, self.num_stages),
            *self._clock_figures(),
            *_timeline_figures(self.evaluation.get("timeline")),
            *[
                (label, f"{first:.3f} -> {last:.3f}")
                for label, (first, last) in self.curves.items()
            ],
        ]

    def _clock_figures(self) -> list[tuple[str, str]]:
        tokens = self.comparison.tokens
        piped, plain = self.pipeline_seconds, self.plain_seconds
        ranks, cores = len(self.evaluation["ranks"]), self.machine["cores"]
        ratio = plain / piped if piped else 0.0
        return [
            (f"wall clock, {ranks} ranks", _rate(piped, tokens)),
            ("wall clock, plain decoding in one process", _rate(plain, tokens)),
            (f"plain / pipeline, {ranks} ranks on {cores} cores", f"{ratio:.2f}"),
        ]

    def repeated(self) -> float:
        """Share of 4-grams that the same text has had before: how easy it is to foresee."""
        seen = total = 0
        for result in self.evaluation["results"]:
            grams = list(zip(*(result["ids"][shift:] for shift in range(4)), strict=False))
            seen += len(grams) - len(set(grams))
            total += len(grams)
        return seen / total if total else 0.0

    def remark(self) -> str:
        """What acceptance and wall clock of this run can say, and what they cannot."""
        return (
            "A target this small, trained for minutes, repeats itself, which is easy to foresee: "
            "this acceptance says that the parts work, not what a large target gives. "
            f"{self._clock_remark()}"
        )

    def _clock_remark(self) -> str:
        ranks, cores = len(self.evaluation["ranks"]), self.machine["cores"]
        eal = _number(self.evaluation.get("eal"))
        if cores < ranks:
            return (
                f"{ranks} ranks share {cores} cores here, so stages that should work at the same "
                "time wait for each other, and a model this small spends most of a cycle on "
                f"messages. The wall clock is what was measured; it is not a speed-up. EAL {eal} "
                "counts cycles: it is how far the schedule alone could go with a device a stage."
            )
        return (
            f"The wall clock is what was measured with {ranks} ranks on {cores} cores. A model "
            f"this small spends most of a cycle on messages. EAL {eal} counts cycles: it is how "
            "far the schedule alone could go."
        )

    def to_table(self) -> Group:
        """The report for a terminal."""
        table = Table(title="megatron-spd quickstart", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for row in self.figures():
            table.add_row(*(_escape(cell) for cell in row))
        ranks = Table(title="ranks", caption=_escape(self.remark()))
        headings, rows = self.rank_rows()
        for heading in headings:
            ranks.add_column(heading, justify="right")
        for cells in rows:
            ranks.add_row(*(_escape(cell) for cell in cells))
        return Group(table, ranks)

    def rank_rows(self) -> tuple[list[str], list[list[str]]]:
        """What each rank did: headings, and cells a rank."""
        headings = ["rank", "stage", "layers", "module", "waves", "nodes", "busy, s"]
        rows = []
        for rank in self.evaluation["ranks"]:
            layers = rank["layers"]
            rows.append(
                [
                    str(rank["rank"]),
                    "-" if rank["stage"] is None else str(rank["stage"]),
                    "-" if layers is None else f"[{layers[0]}, {layers[1]})",
                    "yes" if rank["module"] else "",
                    str(rank["waves"]),
                    str(rank["nodes"]),
                    f"{rank['busy_seconds']:.1f}",
                ]
            )
        return headings, rows

    def facts(self) -> dict[str, Any]:
        """The report as one JSON object."""
        return {
            "text": asdict(self.comparison),
            "evaluation": {
                name: value
                for name, value in self.evaluation.items()
                if name not in ("results", "timeline")
            },
            "pipeline_seconds": self.pipeline_seconds,
            "plain_seconds": self.plain_seconds,
            "repeated_4_grams": self.repeated(),
            "plain_threads": self.plain["threads"],
            "curves": {label: list(ends) for label, ends in self.curves.items()},
            "machine": dict(self.machine),
            "steps": [asdict(step) for step in self.steps],
            "remark": self.remark(),
        }

    def to_markdown(self) -> str:
        """The same figures as Markdown, with the commands that gave them."""
        headings, rows = self.rank_rows()
        text = self.evaluation["results"][0]["text"] if self.evaluation["results"] else ""
        commands = [
            f"megatron-spd {shlex.join(step.command)}" for step in self.steps if step.command
        ]
        took = ", ".join(f"{step.name} {step.seconds:.0f} s" for step in self.steps)
        versions = ", ".join(f"{name} {value}" for name, value in self.machine["versions"].items())
        return "\n".join(
            [
                "# megatron-spd quickstart",
                "",
                *_markdown_table(["figure", "value"], [list(row) for row in self.figures()]),
                "",
                self.remark(),
                "",
                *self.comparison.differences,
                "## Ranks",
                "",
                *_markdown_table(headings, rows),
                "",
                "## Pictures",
                "",
                "![training curves](training.png)",
                "",
                "![stages by cycles](timeline.png)",
                "",
                "## What the pipeline wrote behind the first prompt",
                "",
                *(f"    {line}" for line in text.splitlines()),
                "",
                "## Commands",
                "",
                *(f"    {command}" for command in commands),
                "",
                f"Steps: {took}.",
                "",
                f"{self.machine['cores']} cores, Python {self.machine['python']}, {versions}.",
                "",
            ]
        )

    def check(self) -> None:
        """Whether every text is plain decoding's.

        Raises:
            SpdError: one is not.
        """
        if self.comparison.differences:
            raise SpdError(
                "the pipeline's text is not plain decoding's:\n"
                + "\n".join(self.comparison.differences)
            )

    def write(self, folder: Path) -> None:
        """Writes report.json and report.md."""
        facts = json.dumps(self.facts(), indent=1) + "\n"
        write_all_atomic(
            {
                folder / "report.json": facts.encode(),
                folder / "report.md": self.to_markdown().encode(),
            }
        )


def compare(piped: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compares the ids of two lists of results, prompt by prompt.

    A result that one list lacks counts as different.
    """
    differences = []
    for index in range(max(len(piped), len(plain))):
        ours = list(piped[index]["ids"]) if index < len(piped) else []
        theirs = list(plain[index]["ids"]) if index < len(plain) else []
        if ours == theirs:
            continue
        at = next(
            (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
            min(len(ours), len(theirs)),
        )
        differences.append(
            f"Prompt {index} differs from token {at} on: the pipeline wrote {ours[at : at + 4]}, "
            f"plain decoding {theirs[at : at + 4]}."
        )
    prompts = max(len(piped), len(plain))
    return Comparison(
        prompts=prompts,
        equal=prompts - len(differences),
        tokens=sum(len(result["ids"]) for result in plain),
        differences=tuple(differences),
    )


def ends_of_curve(metrics: Sequence[Mapping[str, Any]], field: str) -> tuple[float, float] | None:
    """Mean of a field over the first and over the last 10 steps; None when it is not there."""
    values = [float(line[field]) for line in metrics if line.get(field) is not None]
    if not values:
        return None
    first, last = values[:AVERAGED_STEPS], values[-AVERAGED_STEPS:]
    return sum(first) / len(first), sum(last) / len(last)


def curves_of(
    joint: Sequence[Mapping[str, Any]], distil: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[float, float]]:
    """Start and end of what both training runs recorded, by label."""
    wanted = (
        ("target's loss, joint training, nats a token", joint, "target_loss"),
        ("module's agreement, joint training", joint, "agreement"),
        ("module's loss, distillation", distil, "loss"),
        ("module's agreement, distillation", distil, "agreement"),
    )
    found = {label: ends_of_curve(metrics, field) for label, metrics, field in wanted}
    return {label: ends for label, ends in found.items() if ends is not None}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl; a last one that was cut off is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _text_figures(comparison: Comparison) -> list[tuple[str, str]]:
    equal = comparison.equal == comparison.prompts
    verdict = "equal" if equal else "NOT EQUAL"
    return [
        (
            "text beside plain decoding",
            f"{verdict}: {comparison.equal} of {comparison.prompts} prompts, "
            f"{comparison.tokens} ids compared",
        )
    ]


def _draft_figures(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    judged = evaluation["accepted"] + evaluation["rejected"]
    interval = evaluation.get("interval")
    between = f", 95 % interval {interval[0]:.3f} to {interval[1]:.3f}" if interval else ""
    return [
        (
            "acceptance",
            f"{_number(evaluation.get('acceptance'), 3)} "
            f"({evaluation['accepted']} of {judged} judged{between})",
        ),
        (
            "agreement in the training forward, same texts",
            f"{_number(evaluation.get('agreement'), 3)} "
            f"({evaluation.get('agreement_judged') or 0} judged)",
        ),
        ("drafts flushed unjudged", str(evaluation["flushed"])),
    ]


def _cycle_figures(evaluation: Mapping[str, Any], num_stages: int) -> list[tuple[str, str]]:
    cycles, committed = evaluation["cycles"], evaluation["committed"]
    a_token = f"{cycles / committed:.2f}" if committed else "-"
    return [
        (
            f"cycles, {num_stages} stages",
            f"{cycles} for {committed} tokens: {a_token} a token, without drafts {num_stages}",
        ),
        (
            "EAL",
            f"{_number(evaluation.get('eal'))}, theory at this acceptance "
            f"{_number(evaluation.get('eal_theory'))}, at most {num_stages}",
        ),
    ]


def _timeline_figures(timeline: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if not timeline:
        return []
    counts = count_fates(timeline_grid(timeline))
    total = sum(counts.values())
    order = ("prompt", "accepted", "corrected", "rejected", "flushed", EMPTY)
    shares = [f"{MEANINGS[fate]} {counts[fate] / total:.0%}" for fate in order if counts[fate]]
    return [(f"first prompt's {total} stage-cycles", ", ".join(shares))]


def _rate(seconds: float, tokens: int) -> str:
    return f"{seconds:.2f} s, {tokens / seconds:.0f} tokens/s" if seconds else "-"


def _number(value: Any, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _escape(text: str) -> str:
    """No markup: "[0, 9)" must not read as a style."""
    return text.replace("[", r"\[")


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [headings, ["---"] * len(headings), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]
