from __future__ import annotations

import os
import sys

import pytest

from megatron_spd.errors import ConfigError
from megatron_spd.launcher import run_under_torchrun, torchrun_command

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host-0", "MASTER_PORT": "29500"}


def test_one_node_stands_alone() -> None:
    assert torchrun_command(["infer", "a.toml"], 3, {}) == [
        *TORCHRUN,
        *("--nproc-per-node", "3", "--standalone"),
        *("-m", "megatron_spd", "infer", "a.toml"),
    ]


def test_several_nodes_meet_at_the_master() -> None:
    assert torchrun_command(["infer"], 4, NODES) == [
        *TORCHRUN,
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
        torchrun_command([], world_size, NODES | changes)


def test_missing_rendezvous_variables_are_named() -> None:
    with pytest.raises(ConfigError, match="NODE_RANK, MASTER_ADDR, MASTER_PORT is not set"):
        torchrun_command([], 4, {"NNODES": "2"})


def test_returns_inside_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("must not exec"))
    run_under_torchrun(["infer"], 2)


def test_becomes_torchrun_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("NNODES", raising=False)
    monkeypatch.setattr(os, "execv", lambda _path, command: calls.append(command))
    run_under_torchrun(["infer"], 2)
    assert calls == [torchrun_command(["infer"], 2, {})]
