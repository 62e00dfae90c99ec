"""The sums, the interval and the verdict of `eval`, and what it refuses before it starts ranks."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_spd.__main__ import main
from megatron_spd.cli.evaluate import EvalReport, summary_of, wilson_interval
from megatron_spd.errors import AgreementError
from megatron_spd.inference.requests import Result
from megatron_spd.schedule.machine import Counters

SHARED = Path(os.environ.get("SPD_SHARED", Path(__file__).resolve().parents[3] / ".." / "shared"))
STORIES = SHARED / "models" / "stories260k"

needs_stories = pytest.mark.skipif(
    not STORIES.exists(), reason="needs shared/models/stories260k beside the project"
)


def result(accepted: int, rejected: int, cycles: int, seconds: float) -> Result:
    counters = Counters(
        accepted=accepted,
        rejected=rejected,
        flushed=1,
        committed=accepted + rejected,
        cycles=cycles,
    )
    ids = tuple(range(accepted + rejected + 1))
    return Result(
        ids=ids, text="", finish_reason="length", counters=counters, seconds=seconds, num_stages=4
    )


def test_the_interval_is_wilsons() -> None:
    assert wilson_interval(0, 0) is None
    # 15 of 20: the published worked value 0.531 .. 0.888
    assert wilson_interval(15, 20) == pytest.approx((0.5313, 0.8881), abs=1e-4)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


def test_sums_are_over_tokens_not_over_prompts() -> None:
    facts = summary_of(
        ["a", "b"],
        [result(9, 1, 20, 1.0), result(0, 2, 8, 1.0)],
        [[True] * 9 + [False], [True, False]],
        4,
    )
    assert (facts["accepted"], facts["rejected"], facts["flushed"]) == (9, 3, 2)
    assert facts["acceptance"] == 9 / 12
    assert (facts["agreement"], facts["agreement_judged"]) == (10 / 12, 12)
    assert facts["eal"] == 4 * 12 / 28
    assert facts["tokens_per_second"] == 14 / 2.0
    assert [part["agreement"] for part in facts["results"]] == [0.9, 0.5]


def test_without_a_module_there_is_nothing_to_compare() -> None:
    facts = summary_of(["a"], [result(0, 0, 0, 0.0)], None, 4)
    assert facts["acceptance"] is facts["agreement"] is facts["eal"] is None
    report = EvalReport(facts=facts, tolerance=0.0)
    report.check()
    report.to_table()


def test_of_a_tree_acceptance_says_no_eal() -> None:
    facts = summary_of(["a"], [result(9, 1, 20, 1.0)], None, 4, is_chain=False)
    assert (facts["acceptance"], facts["eal_theory"]) == (0.9, None)
    assert facts["eal"] == 4 * 10 / 20


def test_disagreement_names_both_values_and_exits_1() -> None:
    facts = {"acceptance": 0.5, "agreement": 0.6}
    EvalReport(facts=facts, tolerance=0.11).check()
    with pytest.raises(AgreementError, match="0.5000.*0.6000") as caught:
        EvalReport(facts=facts, tolerance=0.05).check()
    assert caught.value.exit_code == 1


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@needs_stories
@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        (lines({"question_id": 4, "turns": ["dog " * 600]}), [], "question_id 4: the prompt has"),
        (lines({"turns": ["a"], "question_id": 1}) * 2, [], "question_id 1 occurs twice"),
        (lines({"text": "a"}), [], 'an object with "turns"'),
        (lines({"turns": ["a"]}), ["--eval.module=/nowhere"], "module.json is missing"),
        (lines({"turns": ["a"]}), ["--json=/"], "is a folder"),
        (lines({"turns": ["a"]}), ["--eval.top_p=2"], "top_p is 2.0"),
    ],
)
def test_bad_input_is_refused_before_any_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, more: list[str], said: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(text)
    plan = [f"--plan.target={STORIES}", "--plan.num_stages=2"]
    assert main(["eval", *plan, f"--eval.prompts={prompts}", *more]) == 2
    assert said in capsys.readouterr().err


@needs_stories
def test_a_tokenizer_of_another_target_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = SHARED / "models" / "py-llama-16l"
    for file in STORIES.iterdir():
        source = file if not file.name.startswith("tokenizer") else other / file.name
        (tmp_path / file.name).write_bytes(source.read_bytes())
    plan = [f"--plan.target={tmp_path}", "--plan.num_stages=2"]
    assert main(["generate", *plan, "--generate.prompt=a"]) == 2
    assert "tokens, the target's vocabulary 512" in capsys.readouterr().err
