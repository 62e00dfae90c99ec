"""What cannot work is refused in one sentence, with exit code 2, before a rank or a weight.

A row of `CASES` is a name, what makes the command line, and the words the sentence must have: what
was expected and what came.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron_spd import comm
from megatron_spd.__main__ import main
from megatron_spd.checkpoint.artifact import ArtifactMeta, save_artifact
from megatron_spd.checkpoint.hf_folder import HfFolder
from megatron_spd.speculation.config import ModuleConfig
from megatron_spd.speculation.module import SpeculationModule
from megatron_spd.stage_plan import StagePlan

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("SPD_SHARED", ROOT / ".." / "shared"))
TARGET, OTHER = SHARED / "models/stories260k", SHARED / "models/py-llama-16l"
pytestmark = pytest.mark.skipif(not TARGET.is_dir(), reason=f"no shared models at {SHARED}")

Build = Callable[[Path], list[str]]


@dataclass(frozen=True)
class Case:
    """One input that cannot work."""

    name: str
    argv: Build
    """Makes the files it needs in an empty folder, and returns the command line."""
    words: tuple[str, ...]


def generate(target: Path, *more: str, stages: str = "--plan.num_stages=2") -> list[str]:
    prompt = "--generate.prompt=Once upon a time"
    return ["generate", f"--plan.target={target}", stages, prompt, *more]


def evaluate(target: Path, prompts: Path, *more: str) -> list[str]:
    return [
        *("eval", f"--plan.target={target}", "--plan.num_stages=2"),
        *(f"--eval.prompts={prompts}", *more),
    ]


def changed_target(folder: Path) -> Path:
    """A copy of the target whose files may be changed."""
    shutil.copytree(TARGET, folder / "target")
    for path in (folder / "target").iterdir():
        path.chmod(0o644)
    return folder / "target"


def module_for(target: Path, out: Path, plan: StagePlan) -> Path:
    """The artifact of an untrained module for a target."""
    folder = HfFolder(target)
    spec = folder.spec
    config = ModuleConfig.for_target(spec, plan)
    ids = torch.arange(spec.vocab_size)
    module = SpeculationModule(config, plan, ids)
    meta = ArtifactMeta.of(folder, plan, module=config.to_dict(), draft_ids=ids.tolist())
    save_artifact(out, meta, module.state_dict())
    return out


def module_of_another_target(folder: Path) -> list[str]:
    other = changed_target(folder)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    module = module_for(other, folder / "module", StagePlan.even(5, 2))
    return generate(TARGET, f"--generate.module={module}")


def taps_that_the_plan_lacks(folder: Path) -> list[str]:
    module = module_for(TARGET, folder / "module", StagePlan.even(5, 2))
    return generate(TARGET, f"--generate.module={module}", "--plan.taps=[0,5]")


def no_weights(folder: Path) -> list[str]:
    target = changed_target(folder)
    (target / "model.safetensors").unlink()
    return generate(target)


def cut_weights(folder: Path) -> list[str]:
    target = changed_target(folder)
    data = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(data[:-1000])
    return generate(target)


def larger_tokenizer(folder: Path) -> list[str]:
    target = changed_target(folder)
    shutil.copy(OTHER / "tokenizer.model", target / "tokenizer.model")
    return generate(target)


def no_tokenizer(folder: Path) -> list[str]:
    target = changed_target(folder)
    for name in ("tokenizer.model", "tokenizer.json"):
        (target / name).unlink()
    return generate(target)


def unknown_key_in_the_file(folder: Path) -> list[str]:
    config = folder / "run.toml"
    config.write_text(f'[plan]\ntarget = "{TARGET}"\nnum_stage = 2\n')
    return ["generate", str(config), "--generate.prompt=a"]


def no_prompts(folder: Path) -> list[str]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("")
    module = module_for(TARGET, folder / "module", StagePlan.even(5, 2))
    return evaluate(TARGET, prompts, f"--eval.module={module}")


def train(folder: Path, *more: str, ids: Sequence[int] = (1, 5, 9, 2)) -> list[str]:
    data = folder / "text.jsonl"
    data.write_text(json.dumps({"ids": list(ids)}) + "\n")
    return [
        *("train", f"--plan.target={TARGET}", "--plan.num_stages=2"),
        *(f"--train.data={data}", f"--train.output={folder / 'out'}", *more),
    ]


CASES = [
    Case("text-of-another-tokenizer", lambda f: train(f, ids=(1, 512)), ("1..512", "0..511")),
    Case(
        "no-text",
        lambda f: train(f, f"--train.data={f / 'gone.txt'}"),
        ("no such file", "gone.txt"),
    ),
    Case(
        "rows-beyond-the-context",
        lambda f: train(f, "--train.sequence_tokens=513"),
        ("513", "512 tokens"),
    ),
    Case(
        "weights-of-other-depths",
        lambda f: train(f, "--train.depth_weights=[1,1,1]"),
        ("3 weights", "2 stages"),
    ),
    Case(
        "draft-vocabulary-without-bytes",
        lambda f: train(f, "--module.draft_vocab_size=100"),
        ("(100)", "259"),
    ),
    Case(
        "module-of-another-target", module_of_another_target, ("weights_hash", "module", "target")
    ),
    Case("taps-the-plan-lacks", taps_that_the_plan_lacks, ("(0, 3, 5)", "(0, 5)", "[3]")),
    Case(
        "bounds-short-of-the-layers",
        lambda _: generate(TARGET, stages="--plan.bounds=[0,2,4]"),
        ("end at 4", "5 layers"),
    ),
    Case(
        "more-stages-than-layers",
        lambda _: generate(TARGET, stages="--plan.num_stages=6"),
        ("6", "5"),
    ),
    Case("no-target", lambda folder: generate(folder / "absent"), ("absent", "not a folder")),
    Case("no-weights", no_weights, ("model.safetensors", "missing")),
    Case("cut-weights", cut_weights, ("model.safetensors", "bytes")),
    Case("larger-tokenizer", larger_tokenizer, ("4096", "512")),
    Case("no-tokenizer", no_tokenizer, ("tokenizer.model", "tokenizer.json")),
    Case("unknown-key-in-the-file", unknown_key_in_the_file, ("plan.num_stage;", "num_stages")),
    Case(
        "unknown-option",
        lambda _: generate(TARGET, "--generate.temprature=1"),
        ("generate.temprature",),
    ),
    Case(
        "no-number",
        lambda _: generate(TARGET, "--generate.max_new_tokens=many"),
        ("max_new_tokens", "many"),
    ),
    Case(
        "prompt-beyond-the-context",
        lambda _: generate(TARGET, f"--generate.prompt={'Once upon a time. ' * 200}"),
        ("prompt has", "holds 512"),
    ),
    Case("no-prompts", no_prompts, ("prompts.jsonl", "no prompt")),
]


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Ranks that would be started are listed instead; opening a weight fails."""
    started: list[Sequence[str]] = []

    def start(arguments: Sequence[str]) -> list[comm.RankExit]:
        started.append(arguments)
        return []

    for name in ("RANK", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(comm, "run_torchrun", start)
    monkeypatch.setattr(HfFolder, "read", lambda _self, name: pytest.fail(f"opened {name}"))
    return started


def check_sentence(said: str, words: Sequence[str]) -> None:
    assert said.startswith("megatron-spd: ")
    assert "Traceback" not in said
    assert said.count("megatron-spd: ") == 1
    assert all(word in said for word in words), said


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_is_refused_in_one_sentence_before_anything_starts(
    case: Case,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    nothing_starts: list[Sequence[str]],
) -> None:
    assert main(case.argv(tmp_path)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    check_sentence(shown.err, case.words)
    assert nothing_starts == []


def test_what_can_work_would_start(tmp_path: Path, nothing_starts: list[Sequence[str]]) -> None:
    module = module_for(TARGET, tmp_path / "module", StagePlan.even(5, 2))
    with pytest.raises(SystemExit) as caught:
        main(generate(TARGET, f"--generate.module={module}"))
    assert caught.value.code == 0
    assert len(nothing_starts) == 1


@pytest.mark.parametrize("name", ["module-of-another-target", "cut-weights"])
def test_a_user_reads_nothing_but_the_sentence(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "NNODES")}
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_spd", *case.argv(tmp_path)],
        env={**environ, "PYTHONPATH": os.pathsep.join([str(ROOT), environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    check_sentence(ended.stderr, case.words)
