"""The regenerate command: its file, what resumes it, what it refuses."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_spd.__main__ import main
from megatron_spd.checkpoint.tokenizer import Tokenizer, train_sentencepiece
from megatron_spd.cli import regenerate as command
from megatron_spd.cli.regenerate import RegenerateSummary, regenerate
from megatron_spd.config import PlanConfig, RegenerateOptions
from megatron_spd.errors import ConfigError, PlanError, SpdError

SHARED = Path(os.environ.get("SPD_SHARED", Path(__file__).resolve().parents[3] / ".." / "shared"))
WORDS = ["the cat sat on the mat", "a dog ran to the cat", "the sun and the moon"] * 20
CONTEXT = 64


def make_target(path: Path, **changes: Any) -> Path:
    path.mkdir()
    train_sentencepiece(WORDS, path / "tokenizer.model", 290)
    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 300,
        "max_position_embeddings": CONTEXT,
    }
    LlamaForCausalLM(LlamaConfig(**{**fields, **changes})).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("regenerate") / "target")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    turns = ["the cat", "a dog ran to", "the sun and"]
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(
            json.dumps({"question_id": f"q{place}", "turns": [turn]}) + "\n"
            for place, turn in enumerate(turns)
        )
    )
    return path


def run(target: Path, output: Path, **changes: Any) -> RegenerateSummary:
    fields: dict[str, Any] = {"num_texts": 7, "max_new_tokens": 12, "batch_size": 3, **changes}
    plan = PlanConfig(target=str(target), num_stages=1)
    return regenerate(plan, RegenerateOptions(output=str(output), **fields))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_text_starts_from_nothing(target: Path, tmp_path: Path) -> None:
    summary = run(target, tmp_path / "x.jsonl")
    texts = lines_of(tmp_path / "x.jsonl")
    assert (summary.texts, summary.written, len(texts)) == (7, 7, 7)
    assert summary.tokens == sum(len(text["ids"]) - 1 for text in texts)
    assert all(text["ids"][0] == 1 and 2 <= len(text["ids"]) <= 13 for text in texts)
    assert all(set(text) == {"prompt", "text", "ids"} and not text["prompt"] for text in texts)
    assert len({tuple(text["ids"]) for text in texts}) == 7
    assert "7 texts" in str(summary)


def test_prompts_go_round_and_stand_before_the_text(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    run(target, tmp_path / "x.jsonl", prompts=str(prompts), num_texts=5)
    texts, tokenizer = lines_of(tmp_path / "x.jsonl"), Tokenizer(target)
    asked = ["the cat", "a dog ran to", "the sun and", "the cat", "a dog ran to"]
    assert [text["prompt"] for text in texts] == asked
    for text in texts:
        ids = tokenizer.encode(text["prompt"])
        assert text["ids"][: len(ids)] == ids
        assert text["text"].startswith(text["prompt"])
        known = [token for token in text["ids"] if token < tokenizer.vocab_size]
        assert text["text"] == tokenizer.decode(known)


def test_without_a_number_there_is_one_text_a_prompt(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    assert run(target, tmp_path / "x.jsonl", prompts=str(prompts), num_texts=0).texts == 3


def test_a_text_ends_at_the_context(target: Path, tmp_path: Path) -> None:
    run(target, tmp_path / "x.jsonl", max_new_tokens=500, num_texts=2)
    lengths = [len(text["ids"]) for text in lines_of(tmp_path / "x.jsonl")]
    assert max(lengths) == CONTEXT


@pytest.mark.parametrize("where", ["a line", "a batch", "the first batch", "garbage", "nothing"])
def test_a_resumed_file_is_what_one_run_writes(target: Path, tmp_path: Path, where: str) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    run(target, whole)
    run(target, cut)
    content = whole.read_bytes()
    assert cut.read_bytes() == content
    lines = content.splitlines(keepends=True)
    left, written = {
        "a line": (content[: len(b"".join(lines[:4])) + 5], 4),
        "a batch": (b"".join(lines[:5]), 4),
        "the first batch": (b"".join(lines[:2]) + lines[2][:-1], 7),
        "garbage": (b"".join(lines[:3]) + b"{}\n" + b"".join(lines[4:]), 4),
        "nothing": (b"", 7),
    }[where]
    cut.write_bytes(left)
    assert run(target, cut).written == written
    assert cut.read_bytes() == content


def test_a_stop_in_the_middle_leaves_what_resumes(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    run(target, whole)
    original, calls = command.write_batch, []

    def stopped(*args: Any, **fields: Any) -> Any:
        calls.append(fields["number"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **fields)

    monkeypatch.setattr(command, "write_batch", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(target, cut)
    assert len(lines_of(cut)) == 3
    run(target, cut)
    assert calls == [0, 1, 1, 2]
    assert cut.read_bytes() == whole.read_bytes()


def test_a_finished_file_is_left_alone_without_loading(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(target, tmp_path / "x.jsonl")
    before = (tmp_path / "x.jsonl").stat().st_mtime_ns
    monkeypatch.setattr(command, "load_model", None)
    summary = run(target, tmp_path / "x.jsonl")
    assert (summary.texts, summary.written) == (7, 0)
    assert "already holds its 7 texts" in str(summary)
    assert (tmp_path / "x.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 5}, "begun with seed 0, this run has 5"),
        ({"num_texts": 8}, "begun with num_texts 7, this run has 8"),
        ({"batch_size": 2}, "begun with batch_size 3, this run has 2"),
        ({"temperature": 0.5}, "begun with temperature 1.0, this run has 0.5"),
    ],
)
def test_other_options_do_not_resume(
    target: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    run(target, tmp_path / "x.jsonl")
    with pytest.raises(ConfigError, match=said):
        run(target, tmp_path / "x.jsonl", **changes)


def test_another_target_or_a_foreign_file_does_not_resume(target: Path, tmp_path: Path) -> None:
    run(target, tmp_path / "x.jsonl")
    other = make_target(tmp_path / "other", initializer_range=0.5)
    with pytest.raises(ConfigError, match="begun with target weights hash '[0-9a-f]{16}', this"):
        run(other, tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl.run.json").unlink()
    with pytest.raises(ConfigError, match=r"exists, but not the x.jsonl.run.json"):
        run(target, tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_texts": 0}, "prompts is empty and regenerate.num_texts is 0"),
        ({"prompts": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"top_p": 0.0}, "top_p is 0.0"),
    ],
)
def test_what_cannot_work_is_refused_before_the_weights(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.setattr(command, "load_model", None)
    with pytest.raises(ConfigError, match=said):
        run(target, tmp_path / "x.jsonl", **changes)
    assert not list(tmp_path.iterdir())


def test_a_long_prompt_is_named_with_its_length(target: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"question_id": "long", "turns": ["the cat " * 200]}) + "\n")
    with pytest.raises(ConfigError, match=r"question_id long .* tokens, expected 1 to 63"):
        run(target, tmp_path / "x.jsonl", prompts=str(path))


def test_targets_that_do_not_fit(target: Path, tmp_path: Path) -> None:
    no_start = make_target(tmp_path / "no_start", bos_token_id=None)
    with pytest.raises(ConfigError, match="no bos_token_id"):
        run(no_start, tmp_path / "x.jsonl")
    small = make_target(tmp_path / "small", vocab_size=200)
    with pytest.raises(SpdError, match="290 tokens, the target's vocabulary 200"):
        run(small, tmp_path / "x.jsonl")
    with pytest.raises(PlanError, match="3 layers cannot fill 4 stages"):
        regenerate(
            PlanConfig(target=str(target), num_stages=4),
            RegenerateOptions(output=str(tmp_path / "x.jsonl"), num_texts=1),
        )


def test_the_command_prints_its_summary(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["regenerate", f"--plan.target={target}", "--plan.num_stages=1"]
    arguments += [f"--regenerate.output={tmp_path / 'x.jsonl'}", "--regenerate.num_texts=2"]
    arguments += ["--regenerate.max_new_tokens=4", "--regenerate.temperature=0"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "2 texts" in captured.out
    assert "tokens/s" in captured.err
    first, second = lines_of(tmp_path / "x.jsonl")
    assert first == second
    assert main([*arguments, "--regenerate.seed=1"]) == 2
    assert "begun with seed 0" in capsys.readouterr().err


@pytest.mark.skipif(not (SHARED / "models").is_dir(), reason="needs shared/models; set SPD_SHARED")
def test_stories_are_written_in_words(tmp_path: Path) -> None:
    run(SHARED / "models" / "stories260k", tmp_path / "x.jsonl", num_texts=3, max_new_tokens=40)
    for text in lines_of(tmp_path / "x.jsonl"):
        assert text["ids"][0] == 1
        assert len(text["text"].split()) > 5
