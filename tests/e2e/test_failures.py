"""What a user sees when a rank is lost or a run is ended, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from . import launches

LONG, SHORT = launches.SHARED / "models/py-llama-16l", launches.SHARED / "models/stories260k"
END_S = 30.0
pytestmark = [
    pytest.mark.skipif(not LONG.is_dir(), reason=f"no shared models at {LONG.parent}"),
    pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc"),
]


def busy(num_stages: int, *more: str) -> list[str]:
    """A run that would go on for minutes."""
    return [
        *("generate", f"--plan.target={LONG}", f"--plan.num_stages={num_stages}"),
        *("--generate.prompt=def main():", "--generate.max_new_tokens=2000", *more),
    ]


def read(ended: Any) -> str:
    """The one thing the user reads."""
    assert ended.out == ""
    assert ended.err.isascii()
    assert "Traceback" not in ended.err
    assert ended.err.count("\n") == 1, ended.err
    return str(ended.err)


@pytest.mark.parametrize(
    ("more", "num_ranks", "victim", "name"),
    [
        ([], 2, 0, r"rank 0 \(stage 0, module, host \S+\)"),
        ([], 2, 1, r"rank 1 \(stage 1, host \S+\)"),
        (["--plan.module_own_rank=true"], 3, 2, r"rank 2 \(module, host \S+\)"),
    ],
    ids=["stage-0", "last-stage", "module"],
)
def test_a_killed_rank_is_named_first_and_ends_the_run(
    tmp_path: Path, more: list[str], num_ranks: int, victim: int, name: str
) -> None:
    with launches.launched(busy(2, *more), tmp_path / "tmp") as launch:
        ranks = launch.wait_until_met(num_ranks)
        time.sleep(1.0)  # into the decoding
        os.kill(ranks[victim], signal.SIGKILL)
        ended = launch.end(END_S)
        assert ended.code == 1
        assert re.match(f"megatron-spd: {name} was lost: killed by SIGKILL", read(ended))
        assert launch.left_over() == []


def test_eval_and_train_end_in_the_same_way(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"question_id": 0, "turns": ["def main():"]}) + "\n")
    data = tmp_path / "text.jsonl"
    data.write_text(json.dumps({"ids": [1, *range(300, 500)]}) + "\n")
    plan = [f"--plan.target={LONG}", "--plan.num_stages=2"]
    evaluation = ["eval", *plan, f"--eval.prompts={prompts}", "--eval.max_new_tokens=1000"]
    training = ["train", *plan, f"--train.data={data}", f"--train.output={tmp_path / 'out'}"]
    for argv, killed in ((evaluation, True), (training, False)):
        with launches.launched(argv, tmp_path / argv[0]) as launch:
            ranks = launch.wait_until_met(2)
            time.sleep(1.0)
            if killed:
                os.kill(ranks[1], signal.SIGKILL)
            else:
                to_group(launch, signal.SIGINT)
            ended = launch.end(END_S)
            said = next(line for line in ended.err.splitlines() if line.startswith("megatron-spd"))
            if killed:
                assert ended.code == 1
                assert re.match(r"megatron-spd: rank 1 \(stage 1, host \S+\) was lost", said)
            else:
                assert (ended.code, said) == (
                    130,
                    "megatron-spd: ended by SIGINT, and all 2 ranks with it",
                )
            assert launch.left_over() == []


def test_a_rank_lost_before_the_ranks_met_is_named_too(tmp_path: Path) -> None:
    with launches.launched(busy(3), tmp_path / "tmp") as launch:
        ranks = launch.wait_for_ranks(3)
        os.kill(ranks[1], signal.SIGKILL)
        ended = launch.end(END_S)
        assert ended.code == 1
        assert re.match(r"megatron-spd: rank 1 \(stage 1, host \S+\) was lost", read(ended))
        assert launch.left_over() == []


def to_process(launch: Any, number: int) -> None:
    launch.process.send_signal(number)


def to_group(launch: Any, number: int) -> None:
    """As a terminal does."""
    os.killpg(launch.process.pid, number)


@pytest.mark.parametrize(
    ("send", "number", "code"),
    [(to_group, signal.SIGINT, 130), (to_process, signal.SIGTERM, 143)],
    ids=["ctrl-c", "slurm"],
)
def test_a_signal_ends_every_rank(
    tmp_path: Path, send: Callable[[Any, int], None], number: signal.Signals, code: int
) -> None:
    with launches.launched(busy(2), tmp_path / "tmp") as launch:
        launch.wait_until_met(2)
        send(launch, number)
        ended = launch.end(END_S)
        assert ended.code == code
        assert read(ended) == f"megatron-spd: ended by {number.name}, and all 2 ranks with it\n"
        assert launch.left_over() == []


def test_the_ranks_go_with_a_launcher_that_was_killed(tmp_path: Path) -> None:
    with launches.launched(busy(2), tmp_path / "tmp") as launch:
        ranks = launch.wait_until_met(2)
        launch.process.kill()
        launch.end(END_S)
        limit = time.monotonic() + END_S
        while any(launches.is_alive(pid) for pid in ranks.values()):
            assert time.monotonic() < limit
            time.sleep(0.1)


def test_two_launches_at_once_do_not_meet(tmp_path: Path) -> None:
    argv = ["generate", f"--plan.target={SHORT}", "--plan.num_stages=2", "--json"]
    argv += ["--generate.prompt=Once upon a time", "--generate.max_new_tokens=8"]
    with (
        launches.launched(argv, tmp_path / "one") as one,
        launches.launched(argv, tmp_path / "two") as two,
    ):
        first, second = one.end(launches.MEETING_S), two.end(launches.MEETING_S)
        assert (first.code, second.code) == (0, 0), first.err + second.err
        assert json.loads(first.out)["ids"] == json.loads(second.out)["ids"]
        assert first.err == second.err == ""
        assert one.left_over() == two.left_over() == []
