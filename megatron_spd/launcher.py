"""Starting the ranks: the program becomes torchrun, which starts it again as each rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from megatron_spd.errors import ConfigError


def torchrun_command(argv: Sequence[str], world_size: int, environ: Mapping[str, str]) -> list[str]:
    """The torchrun line that starts `megatron-spd ARGV` on this node's ranks.

    One node (NNODES unset or 1) gets `--standalone`, a free port of its own. Several take NNODES,
    NODE_RANK, MASTER_ADDR and MASTER_PORT, the same line being run on each node.

    Raises:
        ConfigError: a variable is missing or not a number, or the ranks do not divide over the
            nodes.
    """
    nodes = _number(environ, "NNODES", default=1, least=1)
    if world_size < 1 or world_size % nodes:
        raise ConfigError(
            f"the plan needs {world_size} ranks, which do not divide over NNODES ({nodes}); "
            "change the plan or NNODES"
        )
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nproc-per-node", str(world_size // nodes)]
    command += ["--standalone"] if nodes == 1 else _rendezvous(environ, nodes)
    return [*command, "-m", "megatron_spd", *argv]


def run_under_torchrun(argv: Sequence[str], world_size: int) -> None:
    """Becomes torchrun with `world_size` ranks of `megatron-spd ARGV`; returns inside a rank.

    A process that torchrun (or Slurm's own launcher) started has RANK in its environment: there
    this returns at once. Elsewhere it does not return.

    Raises:
        ConfigError: see `torchrun_command`.
    """
    if "RANK" in os.environ:
        return
    command = torchrun_command(argv, world_size, os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def _rendezvous(environ: Mapping[str, str], nodes: int) -> list[str]:
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise ConfigError(f"NNODES is {nodes} but {', '.join(missing)} is not set; set it too")
    node_rank = _number(environ, "NODE_RANK", default=0, least=0)
    if node_rank >= nodes:
        raise ConfigError(f"NODE_RANK ({node_rank}) must be below NNODES ({nodes})")
    port = _number(environ, "MASTER_PORT", default=0, least=1)
    return [
        *("--nnodes", str(nodes)),
        *("--node-rank", str(node_rank)),
        *("--master-addr", environ["MASTER_ADDR"]),
        *("--master-port", str(port)),
    ]


def _number(environ: Mapping[str, str], name: str, *, default: int, least: int) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name} must be a number of at least {least}, got {text!r}")
    return int(text)
