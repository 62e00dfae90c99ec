from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_spd import __version__
from megatron_spd.__main__ import COMMANDS, main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
    "hidden_size": 64,
    "head_dim": 8,
    "intermediate_size": 172,
    "max_position_embeddings": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 512,
}
LAYER = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 172 + 2 * 64


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_plan_as_json(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"--plan.target={target}", "--plan.bounds=[0,1,5]", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["plan"]["bounds"] == [0, 1, 5]
    assert facts["megatron_layout"] == "Et|ttttL"
    assert facts["world_size"] == 2
    assert facts["stages"] == [
        {
            "stage": 0,
            "rank": 0,
            "module": True,
            "layers": [0, 1],
            "taps": [1],
            "parameter_bytes": 4 * (LAYER + 512 * 64),
        },
        {
            "stage": 1,
            "rank": 1,
            "module": False,
            "layers": [1, 5],
            "taps": [5],
            "parameter_bytes": 4 * (4 * LAYER + 64 + 512 * 64),
        },
    ]


def test_tied_target_on_one_stage_counts_the_embedding_once(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"--plan.target={target}", "--plan.num_stages=1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["stages"][0]["parameter_bytes"] == 4 * (5 * LAYER + 64 + 512 * 64)


def test_plan_as_table(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--plan.num_stages=2", "--plan.module_own_rank=true"]
    assert main(["plan", f"--plan.target={target}", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "[0, 3)" in shown
    assert "[3, 5)" in shown
    assert "2 module" in shown
    assert f"{4 * (3 * LAYER + 512 * 64):,}" in shown


def test_plan_reads_a_file_and_the_options_over_it(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[plan]\ntarget = '{target}'\nnum_stages = 5\n[module]\nnum_layers = 2\n")
    assert main(["plan", str(file), "--plan.num_stages=3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["bounds"] == [0, 2, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "--plan.target=/nowhere", "--plan.num_stages=2"], "config.json does not exist"),
        (["plan", "--plan.wrong=1"], "wrong"),
        (["plan", "nowhere.toml"], "nowhere.toml"),
        (["plant"], "unknown subcommand 'plant'"),
    ],
)
def test_user_error_is_one_sentence_and_exit_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("megatron-spd: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_too_many_stages_is_a_plan_error(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"--plan.target={target}", "--plan.num_stages=9"]) == 2
    assert "5 layers cannot fill 9 stages" in capsys.readouterr().err


def test_damaged_config_json_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    assert main(["plan", f"--plan.target={tmp_path}", "--plan.num_stages=1"]) == 2
    assert "not readable JSON" in capsys.readouterr().err


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(name in usage for name in COMMANDS)
    assert main([]) == 2


def test_help_of_a_subcommand_has_the_sentences_under_the_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--help"])
    assert caught.value.code == 0
    assert "Stages of even size" in capsys.readouterr().out
