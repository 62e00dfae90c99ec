from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from megatron_spd.errors import SpdError
from megatron_spd.quickstart.report import Report, compare, curves_of, ends_of_curve, read_metrics
from megatron_spd.quickstart.steps import StepRecord


@pytest.fixture
def report(made_up: SimpleNamespace) -> Report:
    evaluation, plain = made_up.evaluation(), made_up.plain()
    command = ("eval", "--plan.target=a folder", "--json", "eval.json")
    return Report(
        comparison=compare(evaluation["results"], plain["results"]),
        evaluation=evaluation,
        plain=plain,
        curves=curves_of(made_up.metrics(40, joint=True), made_up.metrics(5, joint=False)),
        machine={"cores": 1, "python": "3.11.0", "versions": {"torch": "0.0"}},
        steps=(StepRecord(name="eval", inputs="0", command=command, done=True, seconds=3.2),),
    )


def test_figures_are_those_of_the_files(report: Report) -> None:
    figures = dict(report.figures())
    assert figures["text beside plain decoding"] == "equal: 2 of 2 prompts, 5 ids compared"
    assert figures["acceptance"] == "0.750 (3 of 4 judged, 95 % interval 0.300 to 0.950)"
    assert figures["agreement in the training forward, same texts"] == "0.740 (4 judged)"
    assert figures["drafts flushed unjudged"] == "2"
    assert figures["cycles, 2 stages"] == "5 for 3 tokens: 1.67 a token, without drafts 2"
    assert figures["EAL"] == "1.20, theory at this acceptance 1.60, at most 2"
    assert figures["wall clock, 2 ranks"] == "0.75 s, 7 tokens/s"
    assert figures["wall clock, plain decoding in one process"] == "0.25 s, 20 tokens/s"
    assert figures["plain / pipeline, 2 ranks on 1 cores"] == "0.33"
    assert figures["first prompt's 18 stage-cycles"].startswith("prompt 11%, draft, accepted 33%")


def test_markdown_has_the_figures_the_commands_and_the_pictures(report: Report) -> None:
    text = report.to_markdown()
    assert all(f"| {label} | {value} |" in text for label, value in report.figures())
    assert "    megatron-spd eval '--plan.target=a folder' --json eval.json" in text
    assert "(training.png)" in text and "(timeline.png)" in text
    assert "1 cores, Python 3.11.0, torch 0.0." in text
    assert "it is not a speed-up" in text


def test_remark_says_how_many_cores_there_were(report: Report) -> None:
    roomy = replace(report, machine={**report.machine, "cores": 8})
    assert "2 ranks share 1 cores" in report.remark()
    assert "2 ranks on 8 cores" in roomy.remark()


def test_repeated_share_counts_4_grams_of_one_text(report: Report) -> None:
    texts = [{"ids": [1, 2, 3, 4, 1, 2, 3, 4]}, {"ids": [1, 2, 3, 4]}, {"ids": [1]}]
    other = replace(report, evaluation={**report.evaluation, "results": texts})
    assert other.repeated() == pytest.approx(1 / 6)
    assert report.repeated() == 0


def test_table_shows_figures_and_ranks(report: Report) -> None:
    sink = io.StringIO()
    Console(file=sink, width=160).print(report.to_table())
    shown = sink.getvalue()
    assert "equal: 2 of 2 prompts" in shown
    assert "[4, 8)" in shown


def test_written_files_agree(report: Report, tmp_path: Path) -> None:
    report.write(tmp_path)
    facts = json.loads((tmp_path / "report.json").read_text())
    assert facts["text"]["equal"] == 2
    assert facts["evaluation"]["acceptance"] == 0.75
    assert facts["plain_seconds"] == 0.25
    assert "timeline" not in facts["evaluation"]
    assert (tmp_path / "report.md").read_text() == report.to_markdown()


def test_missing_figures_are_a_dash(report: Report, made_up: SimpleNamespace) -> None:
    nothing = {
        **made_up.evaluation(),
        **dict.fromkeys(("acceptance", "interval", "agreement", "agreement_judged", "eal")),
        "accepted": 0,
        "rejected": 0,
        "committed": 0,
        "cycles": 0,
        "timeline": None,
    }
    figures = dict(replace(report, evaluation=nothing).figures())
    assert figures["acceptance"] == "- (0 of 0 judged)"
    assert figures["agreement in the training forward, same texts"] == "- (0 judged)"


def test_difference_is_found_where_it_is(report: Report) -> None:
    piped = [{"ids": [1, 2, 3]}, {"ids": [4, 5]}, {"ids": [6]}]
    plain = [{"ids": [1, 9, 3]}, {"ids": [4, 5]}]
    found = compare(piped, plain)
    assert (found.prompts, found.equal, found.tokens) == (3, 1, 5)
    assert found.differences[0] == (
        "Prompt 0 differs from token 1 on: the pipeline wrote [2, 3], plain decoding [9, 3]."
    )
    assert found.differences[1].startswith("Prompt 2 differs from token 0 on")
    different = replace(report, comparison=found)
    assert "NOT EQUAL: 1 of 3" in different.to_markdown()
    with pytest.raises(SpdError, match="Prompt 0 differs"):
        different.check()
    report.check()


def test_curve_ends_are_means() -> None:
    metrics = [{"step": step, "loss": float(step)} for step in range(1, 31)]
    assert ends_of_curve(metrics, "loss") == (5.5, 25.5)
    assert ends_of_curve(metrics, "target_loss") is None


def test_metrics_leave_out_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
