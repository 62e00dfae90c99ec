from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_spd import comm, launcher
from megatron_spd.__main__ import COMMANDS, main
from megatron_spd.comm import RankExit, RankNames
from megatron_spd.errors import CommError, ConfigError, RanksFailedError
from megatron_spd.launcher import explain, read_records, run_under_torchrun, torchrun_arguments
from megatron_spd.stage_plan import StagePlan

NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host-0", "MASTER_PORT": "29500"}
NAMES = RankNames(hosts=("h",) * 3, stages={0: 0, 1: 1, 2: 2}, module_rank=0)


def test_one_node_stands_alone() -> None:
    assert torchrun_arguments(["infer", "a.toml"], 3, {}) == [
        *("--nproc-per-node", "3", "--standalone"),
        *("-m", "megatron_spd", "infer", "a.toml"),
    ]


def test_several_nodes_meet_at_the_master() -> None:
    assert torchrun_arguments(["infer"], 4, NODES) == [
        *("--nproc-per-node", "2", "--nnodes", "2", "--node-rank", "1"),
        *("--master-addr", "host-0", "--master-port", "29500"),
        *("-m", "megatron_spd", "infer"),
    ]


@pytest.mark.parametrize(
    ("world_size", "changes", "said"),
    [
        (3, {}, r"3 ranks.*NNODES \(2\)"),
        (4, {"NODE_RANK": "2"}, r"NODE_RANK \(2\)"),
        (4, {"NNODES": "two"}, "NNODES.*'two'"),
        (4, {"MASTER_PORT": "0"}, "MASTER_PORT.*'0'"),
    ],
)
def test_environment_that_cannot_work_is_refused(
    world_size: int, changes: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        torchrun_arguments([], world_size, NODES | changes)


def test_missing_rendezvous_variables_are_named() -> None:
    with pytest.raises(ConfigError, match="NODE_RANK, MASTER_ADDR, MASTER_PORT is not set"):
        torchrun_arguments([], 4, {"NNODES": "2"})


def test_returns_inside_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(comm, "run_torchrun", lambda _: pytest.fail("must not start ranks"))
    run_under_torchrun(["infer"], 2)


def test_a_rank_without_its_launcher_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(launcher.LAUNCHER, "1")
    monkeypatch.setattr(launcher.ctypes, "CDLL", lambda _: type("C", (), {"prctl": print}))
    monkeypatch.setattr(os, "getppid", lambda: 77)
    with pytest.raises(CommError, match=r"launcher \(process 1\) is gone"):
        run_under_torchrun(["infer"], 2)


class Ranks:
    """Stands for the ranks: what they leave, and how they end."""

    def __init__(self, exits: Sequence[RankExit], errors: dict[int, Exception]) -> None:
        self.exits, self.errors = list(exits), errors
        self.folder = Path()

    def __call__(self, arguments: Sequence[str]) -> list[RankExit]:
        assert "megatron_spd" in arguments
        self.folder = Path(os.environ[launcher.FOLDER])
        assert self.folder.is_dir()
        for rank, error in self.errors.items():
            os.environ["RANK"] = str(rank)
            assert launcher.record_failure(error)
            del os.environ["RANK"]
        return self.exits


def run(
    monkeypatch: pytest.MonkeyPatch,
    exits: Sequence[RankExit] = (),
    errors: dict[int, Exception] | None = None,
) -> RanksFailedError:
    """The error of a launch on three ranks whose end is given."""
    ranks = Ranks(exits, errors or {})
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("NNODES", raising=False)
    monkeypatch.setattr(comm, "run_torchrun", ranks)
    with pytest.raises(RanksFailedError) as caught:
        run_under_torchrun(["infer"], 3, StagePlan.even(3, 3))
    assert not ranks.folder.exists()
    assert launcher.FOLDER not in os.environ
    return caught.value


def ended(rank: int, code: int, at: float = 100.0) -> RankExit:
    return RankExit(rank=rank, code=code, noticed_s=at)


def test_ranks_that_end_well_end_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("NNODES", raising=False)
    monkeypatch.setattr(comm, "run_torchrun", Ranks([], {}))
    with pytest.raises(SystemExit) as caught:
        run_under_torchrun(["infer"], 2)
    assert caught.value.code == 0


def test_an_error_of_the_user_keeps_its_exit_code_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors: dict[int, Exception] = {rank: ConfigError("lower it") for rank in (1, 0, 2)}
    error = run(monkeypatch, [ended(0, 2), ended(1, 2), ended(2, 2)], errors)
    assert error.exit_code == 2
    assert str(error).startswith("rank 1 (stage 1, host ")
    assert str(error).endswith("): lower it")


def test_the_cause_outranks_those_who_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    noticed = CommError("rank 1 (stage 1, host h) was lost while receiving tag 3: closed")
    errors: dict[int, Exception] = {0: noticed, 1: ValueError("the reason")}
    error = run(monkeypatch, [ended(0, 1), ended(1, 1), ended(2, -15)], errors)
    first, *behind = str(error).splitlines()
    assert first.startswith("rank 1 (stage 1, host ")
    assert first.endswith("): ValueError: the reason")
    assert behind[-1] == "ValueError: the reason"
    assert error.exit_code == 1


def test_a_peer_on_another_node_is_named_by_who_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "rank 7 (stage 7, host far) was lost while receiving tag 3: closed"
    error = run(monkeypatch, [ended(1, 1), ended(0, -15)], {1: CommError(message)})
    assert str(error) == message
    assert error.exit_code == 1


@pytest.mark.parametrize(
    ("exits", "said"),
    [
        ([ended(1, 1), ended(2, -9), ended(0, -15)], r"rank 2 .*SIGKILL \(signal 9\); .*memory"),
        ([ended(2, -11), ended(0, -15)], r"rank 2 .*SIGSEGV \(signal 11\)$"),
        ([ended(2, -15), ended(0, -15), ended(1, -15)], r"rank 2 .*SIGTERM"),
        ([ended(1, 7), ended(0, -15)], r"rank 1 .*exit code 7 and left no message"),
        ([ended(1, 7), ended(0, -9, at=110.0)], r"rank 1 .*exit code 7 and left no message"),
    ],
    ids=["killed", "crashed", "ended-from-outside", "silent", "killed-by-torchrun-later"],
)
def test_a_rank_that_left_no_word_is_named(exits: list[RankExit], said: str) -> None:
    error = explain(exits, [], NAMES)
    assert error.exit_code == 1
    assert str(error).startswith("rank ")
    assert re.search(said, str(error))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_said_and_later_ones_change_nothing(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.getsignal(number)

    def interrupted(_: Sequence[str]) -> list[RankExit]:
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)
        return []

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("NNODES", raising=False)
    monkeypatch.setattr(comm, "run_torchrun", interrupted)
    with pytest.raises(
        RanksFailedError, match=f"ended by {number.name}, and all 3 ranks"
    ) as caught:
        run_under_torchrun(["infer"], 3)
    assert caught.value.exit_code == 128 + number
    assert signal.getsignal(number) is before


def test_nothing_is_recorded_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launcher.FOLDER, raising=False)
    monkeypatch.setenv("RANK", "0")
    assert not launcher.record_failure(ConfigError("a"))


def test_a_rank_that_cannot_record_says_it_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Sequence[str]) -> None:
        raise ConfigError("lower it")

    monkeypatch.setitem(COMMANDS, "generate", fail)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(launcher.FOLDER, str(tmp_path / "gone"))
    assert main(["generate"]) == 2
    assert capsys.readouterr().err == "megatron-spd: lower it\n"
    monkeypatch.setenv(launcher.FOLDER, str(tmp_path))
    assert main(["generate"]) == 2
    assert capsys.readouterr().err == ""
    assert [record.message for record in read_records(tmp_path)] == ["lower it"]


@pytest.mark.parametrize("launched", [False, True])
def test_an_error_nobody_expected_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launched: bool
) -> None:
    def fail(_: Sequence[str]) -> None:
        raise KeyError("odd")

    monkeypatch.setitem(COMMANDS, "generate", fail)
    monkeypatch.setenv("RANK", "1")
    if not launched:
        monkeypatch.delenv(launcher.FOLDER, raising=False)
        with pytest.raises(KeyError):
            main(["generate"])
        return
    monkeypatch.setenv(launcher.FOLDER, str(tmp_path))
    assert main(["generate"]) == 1
    (record,) = read_records(tmp_path)
    assert record.message.startswith("KeyError: 'odd'\nTraceback")
    assert not record.secondary


def test_ctrl_c_without_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(_: Sequence[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "plan", stop)
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == "megatron-spd: ended by SIGINT\n"
