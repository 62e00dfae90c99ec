"""The owner of ``torch.distributed``: starting ranks, point-to-point messages, named failures.

Messages travel on a ``Channel``: one peer, one tag, in order. A receive may be posted long before
its message exists; both ends must agree on its size. Every failure is a ``CommError`` that starts
with the name of the rank that broke: the peer's, or, where the break is noticed several ranks away,
the one in the first failure any rank recorded.
"""

import logging
import os
import re
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.rendezvous import rendezvous

from megatron_spd.errors import CommError

if TYPE_CHECKING:
    from megatron_spd.stage_plan import StagePlan

_FIRST_FAILURE = "spd/first_failure"
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DEFAULT_TIMEOUT_S = 600.0
GRACE_S = 10
"""Seconds a rank may take to end once it was told to; then it is killed."""


@dataclass(frozen=True, kw_only=True)
class RankNames:
    """What messages call a rank: ``rank 2 (stage 1, host h)``, with what is known of it."""

    hosts: tuple[str, ...] = ()
    stages: Mapping[int, int] = field(default_factory=dict)
    module_rank: int | None = None

    @classmethod
    def of_plan(cls, plan: "StagePlan", hosts: Sequence[str] = ()) -> "RankNames":
        """The names that ``plan`` gives its ranks."""
        stages: dict[int, int] = {}
        for rank in range(plan.world_size):
            stage = plan.roles_of(rank).stage
            if stage is not None:
                stages[rank] = stage
        return cls(hosts=tuple(hosts), stages=stages, module_rank=plan.module_rank)

    def of(self, rank: int) -> str:
        """The name of one rank."""
        known = []
        if rank in self.stages:
            known.append(f"stage {self.stages[rank]}")
        if rank == self.module_rank:
            known.append("module")
        if rank < len(self.hosts):
            known.append(f"host {self.hosts[rank]}")
        return f"rank {rank} ({', '.join(known)})" if known else f"rank {rank}"


@dataclass
class World:
    """The ranks this process met: its own ``rank``, their number, and the store they share."""

    rank: int
    size: int
    store: Store
    timeout_s: float
    names: RankNames = field(default_factory=RankNames)
    gathered: int = 0

    def gather(self, text: str, timeout_s: float | None = None) -> list[str]:
        """Every rank's ``text``, in rank order; all ranks must call it, equally often.

        Raises ``CommError`` naming the ranks that did not within ``timeout_s``.
        """
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        self.gathered += 1
        keys = [f"spd/gather/{self.gathered}/{rank}" for rank in range(self.size)]
        try:
            self.store.set(keys[self.rank], text)
            # The store would not notice that a peer died; the process group does at once.
            dist.barrier(async_op=True).wait(timedelta(seconds=wait_s))
            return [self.store.get(key).decode() for key in keys]
        except RuntimeError as error:
            absent = self._absent(keys)
            raise CommError(
                f"{_first_failure_note()}{', '.join(absent) or 'a rank'} did not answer "
                f"{self.names.of(self.rank)} within {wait_s:g} s: {_first_line(error)}"
            ) from error

    def _absent(self, keys: Sequence[str]) -> list[str]:
        try:
            return [
                self.names.of(rank) for rank, key in enumerate(keys) if not self.store.check([key])
            ]
        except RuntimeError:
            return []


_current: list[World] = []


def init_ranks(backend: str = "gloo", timeout_s: float = DEFAULT_TIMEOUT_S) -> World:
    """Join the ranks that the launcher's environment describes (``RANK``, ``WORLD_SIZE``, ...).

    ``timeout_s`` bounds meeting and every later wait that gives no bound of its own. Calling it
    again returns the same world. Raises ``CommError`` when the environment lacks a variable or the
    ranks do not meet.
    """
    if _current:
        return _current[0]
    missing = [name for name in _ENVIRONMENT if name not in os.environ]
    if missing:
        raise CommError(f"{', '.join(missing)} not set; start the ranks with torchrun")
    bound = timedelta(seconds=timeout_s)
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=bound)))
        store.set_timeout(bound)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=bound)
    except (RuntimeError, ValueError) as error:
        raise CommError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} did not meet the others at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {timeout_s:g} s: "
            f"{_first_line(error)}"
        ) from error
    world = World(rank=rank, size=size, store=store, timeout_s=timeout_s)
    _current.append(world)
    world.names = RankNames(hosts=tuple(world.gather(socket.gethostname())))
    return world


def init_local() -> World:
    """A world of one rank, without a launcher or a network; the current world if there is one."""
    if not _current:
        store = HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        names = RankNames(hosts=(socket.gethostname(),))
        _current.append(World(rank=0, size=1, store=store, timeout_s=60.0, names=names))
    return _current[0]


def current_world() -> World:
    """The world joined by ``init_ranks`` or ``init_local``; ``CommError`` before that."""
    if not _current:
        raise CommError("no ranks were joined yet; call init_ranks or init_local first")
    return _current[0]


def name_stages(plan: "StagePlan") -> RankNames:
    """Let messages say which stage a rank runs; ``CommError`` when the plan needs other ranks."""
    world = current_world()
    if plan.world_size != world.size:
        raise CommError(f"the plan needs {plan.world_size} ranks, {world.size} were started")
    world.names = RankNames.of_plan(plan, world.names.hosts)
    return world.names


def shutdown() -> None:
    """Leave the world; harmless when none was joined or a peer is already gone."""
    if _current:
        _current.clear()
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group()


def exchange_fingerprints(fingerprint: str, timeout_s: float | None = None) -> None:
    """Raise ``CommError`` naming the ranks whose ``fingerprint`` is not that of rank 0."""
    world = current_world()
    answers = world.gather(fingerprint, timeout_s)
    others = [
        f"{world.names.of(rank)} has {answer}"
        for rank, answer in enumerate(answers)
        if answer != answers[0]
    ]
    if others:
        raise CommError(
            f"fingerprints differ: {world.names.of(0)} has {answers[0]}, {', '.join(others)}; "
            "start every rank with the same plan and checkpoint"
        )


def barrier() -> None:
    """Wait for every rank; ``CommError`` when one is gone."""
    try:
        dist.barrier()
    except RuntimeError as error:
        raise _failure("a rank was lost in a barrier", error) from error


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of ``values`` over all ranks, a new tensor of its shape; ``CommError`` on loss."""
    total = values.clone()
    try:
        dist.all_reduce(total)
    except RuntimeError as error:
        raise _failure("a rank was lost in a sum", error) from error
    return total


@contextmanager
def naming_losses(doing: str) -> Iterator[None]:
    """Turn what the backend raises inside the block, in a library's hands, into ``CommError``."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not re.search("gloo|NCCL", str(error)):
            raise
        raise _failure(f"a rank was lost while {doing}", error) from error


def report_first_failure(message: str) -> str:
    """Record ``message`` unless a rank recorded one before; return the first one recorded."""
    if not _current:
        return message
    try:
        return str(current_world().store.compare_set(_FIRST_FAILURE, "", message).decode())
    except RuntimeError:
        # The store went down with the rank that held it.
        return message


@contextmanager
def reporting_failures() -> Iterator[None]:
    """Record what escapes the block, before the peers can notice that this rank is gone."""
    try:
        yield
    except BaseException as error:
        own = current_world().names.of(current_world().rank) if _current else "this rank"
        report_first_failure(f"{own} failed: {type(error).__name__}: {_first_line(error)}")
        raise


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """How a rank's process ended, as its torchrun saw it."""

    rank: int
    code: int
    """Exit code; minus the signal's number when a signal ended it."""
    noticed_s: float
    """Unix time in seconds when it was noticed."""


def run_torchrun(arguments: Sequence[str]) -> list[RankExit]:
    """Be torchrun with the arguments of its command line, in this process, until its ranks ended.

    Returns the ranks of this node that failed, none when all went well. The first failure ends the
    others: by SIGTERM, and ``GRACE_S`` later by SIGKILL; so does an exception in this process.
    Torchrun's own log, which buries what the ranks say, appears when ``LOGLEVEL`` is set.

    Raises ``CommError`` when the nodes do not meet.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import PContext
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    # After a failure torchrun waits 30 s for the other ranks, and has no option for it.
    PContext.close.__defaults__ = (None, GRACE_S)
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)
    try:
        torchrun.run(torchrun.parse_args([f"--shutdown-timeout={GRACE_S}", *arguments]))
    except ChildFailedError as failed:
        return [
            RankExit(rank=rank, code=failure.exitcode, noticed_s=float(failure.timestamp))
            for rank, failure in failed.failures.items()
        ]
    except (RuntimeError, OSError, RendezvousError) as error:
        raise CommError(f"torchrun could not start the ranks: {_first_line(error)}") from error
    finally:
        logging.disable(logging.NOTSET)
    return []


class Pending:
    """A posted receive."""

    def __init__(self, peer: int, tag: int, buffer: Tensor, work: dist.Work) -> None:
        self._peer = peer
        self._tag = tag
        self._buffer = buffer
        self._work: dist.Work | None = work

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """The message, once it is here; the same tensor when asked again.

        ``timeout_s`` defaults to that of the world. Raises ``CommError`` naming the peer when it
        is gone or silent for so long; the connection cannot be used after that.
        """
        if self._work is not None:
            _wait(self._work, self._peer, f"receiving tag {self._tag}", timeout_s)
            self._work = None
        return self._buffer


class Channel:
    """Ordered messages with rank ``peer`` under ``tag``.

    Sends return at once. A message is delivered only into a posted receive, so at most
    ``max_unsent`` sends are kept alive; one more waits for the oldest.
    """

    def __init__(self, peer: int, tag: int, max_unsent: int = 64) -> None:
        world = current_world()
        if not 0 <= peer < world.size or peer == world.rank:
            raise CommError(
                f"{world.names.of(world.rank)} cannot open a channel to rank {peer} "
                f"of {world.size} ranks"
            )
        self.peer = peer
        self.tag = tag
        self._max_unsent = max_unsent
        self._unsent: deque[tuple[dist.Work, Tensor]] = deque()

    def post_receive(
        self,
        shape: int | Sequence[int],
        dtype: torch.dtype = torch.uint8,
        device: torch.device | str = "cpu",
    ) -> Pending:
        """Make room for the next message: so many bytes, or a shape of ``dtype``."""
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        buffer = torch.empty(size, dtype=dtype, device=device)
        try:
            work = dist.irecv(buffer, src=self.peer, tag=self.tag)
        except RuntimeError as error:
            raise _lost(self.peer, f"receiving tag {self.tag}", error) from error
        if work is None:
            raise CommError("this process is not a member of the process group")
        return Pending(self.peer, self.tag, buffer, work)

    def send(self, message: Tensor, timeout_s: float | None = None) -> None:
        """Start sending ``message``, which must not be written to afterwards.

        Its size must be that of the receive posted for it. Raises ``CommError`` naming the peer
        when it is known to be gone, or ``timeout_s`` passed while waiting for the oldest send.
        """
        doing = f"sending tag {self.tag}"
        while len(self._unsent) >= self._max_unsent:
            _wait(self._unsent.popleft()[0], self.peer, doing, timeout_s)
        kept = message.detach().contiguous()
        try:
            work = dist.isend(kept, dst=self.peer, tag=self.tag)
        except RuntimeError as error:
            raise _lost(self.peer, doing, error) from error
        if work is None:
            raise CommError("this process is not a member of the process group")
        self._unsent.append((work, kept))

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until the peer took every message; ``CommError`` as in ``send``."""
        while self._unsent:
            _wait(self._unsent.popleft()[0], self.peer, f"sending tag {self.tag}", timeout_s)


def _wait(work: dist.Work, peer: int, doing: str, timeout_s: float | None) -> None:
    bound_s = current_world().timeout_s if timeout_s is None else timeout_s
    try:
        work.wait(timedelta(seconds=bound_s))
    except RuntimeError as error:
        raise _lost(peer, doing, error) from error


def _lost(peer: int, doing: str, error: RuntimeError) -> CommError:
    return _failure(f"{current_world().names.of(peer)} was lost while {doing}", error)


def _failure(message: str, error: RuntimeError) -> CommError:
    own = current_world().names.of(current_world().rank)
    full = f"{message}: {_first_line(error)} (noticed by {own})"
    first = report_first_failure(full)
    return CommError(full if first == full else f"{first}; then {full}")


def _first_failure_note() -> str:
    """What another rank recorded, as the beginning of a message; nothing is recorded here."""
    try:
        store = current_world().store
        if not store.check([_FIRST_FAILURE]):
            return ""
        return f"{store.get(_FIRST_FAILURE).decode()}; then "
    except RuntimeError:
        return ""


def _first_line(error: BaseException) -> str:
    """The first line in ASCII, without gloo's source position and its advice to the reader."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    line = re.sub(r"^\[\S+:\d+\] ", "", line.encode("ascii", "ignore").decode())
    return line.split(" This is typically caused by")[0].strip()
