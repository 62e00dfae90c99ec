"""Starting the ranks, watching them, and saying in one sentence why they ended.

The program is its own torchrun: it starts itself again as each rank, in a session of its own, so
that a terminal's Ctrl-C reaches only this process. The first failure or signal ends every rank.
A rank that fails leaves a record in the launch's folder instead of printing; a rank that was
killed leaves its exit code. The one cause is chosen from both.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from megatron_spd.errors import CommError, ConfigError, RanksFailedError, SpdError

if TYPE_CHECKING:
    from megatron_spd.comm import RankExit, RankNames
    from megatron_spd.stage_plan import StagePlan

FOLDER, LAUNCHER = "SPD_LAUNCH_FOLDER", "SPD_LAUNCHER_PID"
"""What ranks are told of their launch: where a failure is recorded, and who started them."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_HINTS = {signal.SIGKILL: "; the system does so when memory runs out"}


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """What a failing rank leaves for its launcher."""

    rank: int
    message: str
    exit_code: int
    secondary: bool
    """Whether it failed because a peer did."""
    time_s: float
    """On this machine's monotonic clock, in seconds."""


class _Interrupted(BaseException):
    """A signal to this process; no `except Exception` on the way may keep it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def torchrun_arguments(
    argv: Sequence[str], world_size: int, environ: Mapping[str, str]
) -> list[str]:
    """Torchrun's arguments that start `megatron-spd ARGV` on this node's ranks.

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
    ranks = ["--nproc-per-node", str(world_size // nodes)]
    meeting = ["--standalone"] if nodes == 1 else _rendezvous(environ, nodes)
    return [*ranks, *meeting, "-m", "megatron_spd", *argv]


def run_under_torchrun(argv: Sequence[str], world_size: int, plan: StagePlan | None = None) -> None:
    """Start `world_size` ranks of `megatron-spd ARGV` and see them to their end; returns in a rank.

    A process that torchrun (or Slurm's own launcher) started has RANK in its environment: there
    this returns at once. Elsewhere it does not return. `plan` is whose stages a message names.

    Raises:
        ConfigError: see `torchrun_arguments`.
        RanksFailedError: a rank failed or was lost, or a signal came. No rank is left by then.
        SystemExit: with code 0, all ranks ended well.
    """
    if "RANK" in os.environ:
        _die_with_the_launcher()
        return
    arguments = torchrun_arguments(argv, world_size, os.environ)
    from megatron_spd import comm  # loads torch, which `megatron-spd plan` does without

    hosts = (socket.gethostname(),) * world_size
    names = comm.RankNames(hosts=hosts) if plan is None else comm.RankNames.of_plan(plan, hosts)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        with _signals_raise(), _launch_folder() as folder:
            # torchrun makes a folder for its error files wherever it is told to, and leaves it
            logs = ["--log-dir", str(folder), "--signals-to-handle", "SIGQUIT"]
            exits = comm.run_torchrun([*logs, *arguments])
            if exits:
                raise explain(exits, read_records(folder), names)
    except _Interrupted as interrupted:
        name = signal.Signals(interrupted.number).name
        raise RanksFailedError(
            f"ended by {name}, and all {world_size} ranks with it", 128 + interrupted.number
        ) from None
    raise SystemExit(0)


def record_failure(error: BaseException) -> bool:
    """Leave `error` for the launcher of this rank; False when there is none to read it.

    Then, or when it cannot be written, the rank has to say it itself.
    """
    folder, rank = os.environ.get(FOLDER), os.environ.get("RANK")
    if folder is None or rank is None:
        return False
    known = isinstance(error, SpdError)
    record = FailureRecord(
        rank=int(rank),
        message=str(error) if known else "".join(_lines_of(error)).rstrip(),
        exit_code=error.exit_code if isinstance(error, SpdError) else 1,
        secondary=isinstance(error, CommError),
        time_s=time.monotonic(),
    )
    path = Path(folder) / f"failure-{rank}.json"
    with suppress(OSError):
        path.with_suffix(".part").write_text(json.dumps(asdict(record)), encoding="utf-8")
        path.with_suffix(".part").rename(path)
        return True
    return False


def read_records(folder: Path) -> list[FailureRecord]:
    """What the ranks of a launch left, earliest first."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("failure-*.json")]
    records = [FailureRecord(**json.loads(text)) for text in texts]
    return sorted(records, key=lambda record: record.time_s)


def explain(
    exits: Sequence[RankExit], records: Sequence[FailureRecord], names: RankNames
) -> RanksFailedError:
    """The one cause among ranks that failed, were killed, or only noticed that a peer was gone.

    A rank that a signal killed comes first: whatever the others recorded follows from it. Not so
    the ranks that torchrun ended because of the first one, by SIGTERM or, seconds later, SIGKILL.
    """
    begin = min((end.noticed_s for end in exits), default=0.0)
    killed = [
        end
        for place, end in enumerate(exits)
        if end.code < 0
        and end.noticed_s < begin + 5.0
        and (place == 0 or end.code != -signal.SIGTERM)
    ]
    if killed:
        return RanksFailedError(_was_lost(killed[0], names), 1)
    causes = [record for record in records if not record.secondary] or records
    if causes:
        cause = causes[0]
        named = cause.secondary and cause.message.startswith("rank ")
        prefix = "" if named else f"{names.of(cause.rank)}: "
        return RanksFailedError(prefix + cause.message, cause.exit_code)
    first = next((end for end in exits if end.code > 0), exits[0])
    return RanksFailedError(
        f"{names.of(first.rank)} ended with exit code {first.code} and left no message", 1
    )


def _was_lost(end: RankExit, names: RankNames) -> str:
    number = -end.code
    known = {int(value): value for value in signal.Signals}
    name = known[number].name if number in known else f"signal {number}"
    hint = _HINTS.get(known[number], "") if number in known else ""
    return f"{names.of(end.rank)} was lost: killed by {name} (signal {number}){hint}"


def _lines_of(error: BaseException) -> list[str]:
    """An error nobody expected: what it is, then where it came from."""
    return [f"{type(error).__name__}: {error}\n", *traceback.format_exception(error)]


@contextmanager
def _signals_raise() -> Iterator[None]:
    """The first signal that asks for an end raises; the ones behind it change nothing.

    Python's own handlers would leave the ranks to themselves on SIGTERM and SIGHUP.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise _Interrupted(number)

    # a signal that the caller ignores (nohup) stays ignored
    heeded = [each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, stop) for each in heeded}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def _launch_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="megatron-spd-"))
    told = {FOLDER: str(folder), LAUNCHER: str(os.getpid())}
    os.environ.update(told)
    try:
        yield folder
    finally:
        for name in told:
            os.environ.pop(name, None)
        shutil.rmtree(folder, ignore_errors=True)


def _die_with_the_launcher() -> None:
    """Have the kernel kill this rank when its launcher is gone: no one else could end it."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != int(launcher):
        raise CommError(f"the launcher (process {launcher}) is gone; start the ranks again")


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
