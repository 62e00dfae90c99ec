"""Running a function on several ranks of this machine, for tests."""

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from megatron_spd import comm
from megatron_spd.errors import CommError

_GRACE_S = 1.0
_PRELOADED = ["torch", "torch.distributed", "megatron_spd.inference.engine"]


@dataclass
class _Report:
    """What a rank sent back: its pickled result, or its traceback."""

    result: bytes | None = None
    failure: str | None = None
    secondary: bool = False


@dataclass
class _Job:
    """What a rank is told."""

    rank: int
    world_size: int
    port: int
    timeout_s: float
    deadline: float
    init: bool
    stack_file: str
    module: str
    module_file: str | None
    call: bytes = field(repr=False)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    timeout_s: float = 120.0,
    init: bool = True,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Call ``fn(rank, *args)`` in ``world_size`` new processes; return the results by rank.

    ``fn``, ``args`` and the results must pickle. Each process has one thread, the environment of a
    launcher's worker and, with ``init``, has joined its peers (``comm.init_ranks``, gloo). A rank
    in ``may_die`` may end without a word; its result is None. Raises ``AssertionError`` whose
    message is the traceback of the rank that failed first, or, after ``timeout_s`` seconds, the
    stacks of the ranks still running. No rank is left running in any case.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    module = getattr(fn, "__module__", "builtins")
    deadline = time.monotonic() + timeout_s
    processes: list[ForkServerProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                job = _Job(
                    rank=rank,
                    world_size=world_size,
                    port=store.port,
                    timeout_s=timeout_s,
                    deadline=deadline,
                    init=init,
                    stack_file=str(Path(folder) / f"stack{rank}"),
                    module=module,
                    module_file=getattr(sys.modules.get(module), "__file__", None),
                    call=pickle.dumps((fn, tuple(args))),
                )
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run_rank, args=(job, sender), daemon=True)
                process.start()
                sender.close()
                processes.append(process)
                pipes.append(receiver)
            reports = _collect(processes, pipes, deadline, may_die)
            _raise_failure(reports, world_size, timeout_s, Path(folder))
        finally:
            _end(processes)
            for pipe in pipes:
                pipe.close()
    results = [reports[rank].result for rank in range(world_size)]
    return [None if result is None else pickle.loads(result) for result in results]


def _collect(
    processes: Sequence[ForkServerProcess],
    pipes: Sequence[Connection],
    deadline: float,
    may_die: Collection[int],
) -> dict[int, _Report]:
    """The ranks' reports in order of arrival, until all are here, one failed or time is up."""
    reports: dict[int, _Report] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(waiting), timeout=left):
            assert isinstance(ready, Connection)
            rank = waiting.pop(ready)
            try:
                reports[rank] = ready.recv()
            except EOFError:
                processes[rank].join(timeout=_GRACE_S)
                code = processes[rank].exitcode
                failure = None if rank in may_die else f"rank {rank} died with exit code {code}"
                reports[rank] = _Report(failure=failure)
            if reports[rank].failure is not None:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return reports


def _raise_failure(
    reports: dict[int, _Report], world_size: int, timeout_s: float, folder: Path
) -> None:
    failed = [(rank, report) for rank, report in reports.items() if report.failure is not None]
    if failed:
        first = next((pair for pair in failed if not pair[1].secondary), failed[0])
        others = [
            f"rank {rank} then failed: {str(report.failure).strip().splitlines()[-1]}"
            for rank, report in failed
            if rank != first[0]
        ]
        raise AssertionError("\n".join([f"rank {first[0]}:\n{first[1].failure}", *others]))
    silent = [rank for rank in range(world_size) if rank not in reports]
    if silent:
        stacks = []
        for rank in silent:
            path = folder / f"stack{rank}"
            text = path.read_text() if path.exists() else ""
            stacks.append(f"rank {rank}:\n{text or 'no stack'}")
        raise AssertionError(
            f"ranks {silent} did not end within {timeout_s:g} s\n" + "\n".join(stacks)
        )


def _end(processes: Sequence[ForkServerProcess]) -> None:
    """Let finished ranks leave, then kill every rank and what it started."""
    limit = time.monotonic() + _GRACE_S
    for process in processes:
        process.join(timeout=max(0.0, limit - time.monotonic()))
    for process in processes:
        if process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        process.close()


def _run_rank(job: _Job, pipe: Connection) -> None:
    """The body of one rank's process."""
    os.setsid()
    # Should the test process be killed, its ranks still end.
    signal.alarm(int(job.timeout_s) + 10)
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    with open(job.stack_file, "w") as stack:
        # The monotonic clock is one for all processes of a machine.
        left = job.deadline - time.monotonic() - 0.1 * job.timeout_s
        faulthandler.dump_traceback_later(max(0.1, left), file=stack)
        report = _report_of(job)
        faulthandler.cancel_dump_traceback_later()
    pipe.send(report)
    pipe.close()
    comm.shutdown()


def _report_of(job: _Job) -> _Report:
    try:
        _load_module(job.module, job.module_file)
        fn, args = pickle.loads(job.call)
        if job.init:
            comm.init_ranks("gloo", timeout_s=job.timeout_s)
        with comm.reporting_failures():
            return _Report(result=pickle.dumps(fn(job.rank, *args)))
    except BaseException as error:
        return _Report(failure=traceback.format_exc(), secondary=isinstance(error, CommError))


def _load_module(name: str, file: str | None) -> None:
    """Load the function's module from its file: a test's is often not on the import path."""
    if name in sys.modules or name == "__main__" or file is None:
        return
    if name.partition(".")[0] == __package__:
        importlib.import_module(name)
        return
    parts = name.split(".")
    for depth in range(1, len(parts)):
        # Unpickling asks for the packages above the module, so they must exist too.
        package = ModuleType(".".join(parts[:depth]))
        package.__path__ = [str(Path(file).parents[len(parts) - 1 - depth])]
        sys.modules.setdefault(package.__name__, package)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        return
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
