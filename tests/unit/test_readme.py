"""The README's picture is the machine's, its commands run, and its tree exists."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import megatron_spd.schedule.machine as machine
from megatron_spd.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    \./launch\.sh (plan .*)$", README, flags=re.MULTILINE)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "dtype": "float32",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 5,
    "vocab_size": 32,
}


def test_picture_is_the_one_of_the_machine() -> None:
    picture = re.findall(r"^ +(cycle .*|\d {5}.*)$", README, flags=re.MULTILINE)
    assert len(picture) == 7
    assert all(line.strip() in (machine.__doc__ or "") for line in picture)


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 3


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "RUN.toml"
    file.write_text(f"[plan]\ntarget = '{tmp_path}'\nnum_stages = 2\n")
    words = shlex.split(command.replace("FOLDER", str(tmp_path)).replace("RUN.toml", str(file)))
    assert main(words) == 0
    assert "stages" in capsys.readouterr().out


def test_tree_exists() -> None:
    tree = README.split("## Tree")[1].split("## Measured")[0]
    for line in tree.strip("\n").splitlines():
        indent = "megatron_spd" if line.startswith("      ") else "."
        for name in re.split(r"  +", line.strip())[0].split():
            assert (ROOT / indent / name).exists(), name
