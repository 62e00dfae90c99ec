"""`train` as a user runs it: killed and started again it is the run that was never killed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from megatron_spd.checkpoint.artifact import load_meta

from .launches import SHARED, Launch, launched

STORIES = SHARED / "models" / "stories260k"
STEPS = 10

pytestmark = pytest.mark.skipif(
    not STORIES.exists(), reason="needs shared/models/stories260k beside the project"
)


def arguments(folder: Path, output: str) -> list[str]:
    data = folder / "text.jsonl"
    rows = [{"ids": [1, *range(300 + k, 340 + k), *range(400, 430)]} for k in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("train", f"--plan.target={STORIES}", "--plan.num_stages=2"),
        *(f"--train.data={data}", f"--train.output={folder / output}"),
        *(f"--train.num_steps={STEPS}", "--train.save_every_steps=5", "--train.seed=3"),
        *("--train.num_micro_batches=2", "--train.micro_batch_size=2"),
        *("--train.sequence_tokens=64", "--train.num_warmup_steps=2"),
    ]


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    whole = hashlib.sha256()
    for path in files:
        whole.update(path.name.encode() + path.read_bytes())
    return whole.hexdigest()


def steps_of(output: Path) -> list[int]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def wait_for(launch: Launch, path: Path) -> None:
    limit = time.monotonic() + 120
    while not path.exists():
        assert launch.process.poll() is None, launch.process.communicate()
        assert time.monotonic() < limit, f"{path} did not appear"
        time.sleep(0.02)


def test_ten_steps_are_five_and_a_kill_and_a_resume(tmp_path: Path) -> None:
    before = digest(STORIES)
    with launched(arguments(tmp_path, "whole"), tmp_path / "a") as launch:
        ended = launch.end(120)
        assert ended.code == 0, ended.err
    with launched(arguments(tmp_path, "halves"), tmp_path / "b") as launch:
        ranks = launch.wait_for_ranks(2)
        wait_for(launch, tmp_path / "halves" / "step-00000005")
        os.kill(ranks[1], signal.SIGKILL)
        ended = launch.end(30)
        assert ended.code == 1
        assert "megatron-spd: rank 1 (stage 1, module, host" in ended.err, ended.err
        assert launch.left_over() == []
    assert not (tmp_path / "halves" / "module").exists()
    with launched(arguments(tmp_path, "halves"), tmp_path / "c") as launch:
        ended = launch.end(120)
        assert ended.code == 0, ended.err
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert steps_of(halves) == steps_of(whole) == list(range(1, STEPS + 1))
    for part in ("module", f"step-{STEPS:08d}"):
        assert digest(whole / part) == digest(halves / part)
    assert digest(STORIES) == before
    assert load_meta(halves / "module").stage_plan.bounds == (0, 3, 5)
    with launched([*arguments(tmp_path, "whole"), "--train.seed=4"], tmp_path / "d") as launch:
        ended = launch.end(120)
    assert ended.code == 2
    assert "seed" in ended.err and "3" in ended.err and "4" in ended.err
    assert ended.err.count("megatron-spd: ") == 1 and "Traceback" not in ended.err
