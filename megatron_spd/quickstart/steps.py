"""Steps of a long job in a folder: each runs once, and again only when what goes into it changed.

A step's record, `steps/NAME.json`, is written when it starts and when it ends. A step that was cut
off goes on with the files it left; a step whose inputs changed starts from nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from megatron_spd import __version__
from megatron_spd.checkpoint.atomic import write_atomic
from megatron_spd.errors import ConfigError, SpdError

PROGRESS_LINE = re.compile(r"^\S+ \d+/\d+, .*")
POLL_S = 0.2
GRACE_S = 20.0
SAY_EVERY_S = 10.0
LOG_LINES_SHOWN = 25
LAUNCH_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK"),
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: a subcommand in a process of its own, or a function in this one."""

    name: str
    makes: tuple[str, ...]
    """Files and folders it writes, relative to the job's folder; they are its own to delete."""
    reads: tuple[str, ...] = ()
    """Files and folders that go into it, relative to the job's folder."""
    command: tuple[str, ...] = ()
    """Arguments of `megatron-spd`; empty for a function."""
    work: Callable[[], None] | None = None
    """What a step without a command does."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Whatever else its result depends on."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What is known of a step that ran."""

    name: str
    inputs: str
    """Digest of everything that goes into it."""
    command: tuple[str, ...]
    done: bool
    seconds: float
    """Wall clock; of a step that was cut off and went on, of the last part."""


class Job:
    """Runs steps in a folder, showing what happens on `console`.

    Raises:
        ConfigError: the folder holds a step's results without the record of having made them.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder = folder
        self.console = console

    def run(self, step: Step) -> StepRecord:
        """Runs a step unless its result is there and its inputs are unchanged.

        Raises:
            SpdError: the step's process failed; the message names the step and ends with its log.
            KeyboardInterrupt: the user ended it; its processes have ended too.
        """
        inputs = self.digest(step)
        made = [self.folder / name for name in step.makes]
        old = self.record(step.name)
        if old is None and any(path.exists() for path in made):
            taken = next(path for path in made if path.exists())
            raise ConfigError(
                f"{taken} exists but was not written by this command; choose another "
                "quickstart.output or move it away"
            )
        if old and old.done and old.inputs == inputs and all(path.exists() for path in made):
            self.say(f"{step.name}: done before, in {old.seconds:.0f} s")
            return old
        if old and old.inputs != inputs:
            for path in made:
                _remove(path)
        self._write(step, inputs, done=False, seconds=0.0)
        started = time.monotonic()
        if step.work is not None:
            with self._status(step.name):
                step.work()
        else:
            self._run_command(step)
        lost = [str(path) for path in made if not path.exists()]
        if lost:
            raise SpdError(f"step {step.name} ended without writing {', '.join(lost)}")
        seconds = time.monotonic() - started
        self.say(f"{step.name}: {seconds:.0f} s")
        return self._write(step, inputs, done=True, seconds=round(seconds, 2))

    def record(self, name: str) -> StepRecord | None:
        """The record of a step, or None when it never ran here or the record is damaged."""
        try:
            fields = json.loads(self._record_path(name).read_text(encoding="utf-8"))
            return StepRecord(**{**fields, "command": tuple(fields["command"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def digest(self, step: Step) -> str:
        """16 hex digits over the version, the command, the settings and the files that go in."""
        facts = (__version__, step.name, step.command, step.settings)
        digest = hashlib.sha256(repr(facts).encode())
        for name in step.reads:
            for path in _files_of(self.folder / name):
                digest.update(path.relative_to(self.folder).as_posix().encode() + b"\0")
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()[:16]

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def log_path(self, name: str) -> Path:
        """Where the output of a step's process is kept."""
        return self.folder / "logs" / f"{name}.log"

    def _run_command(self, step: Step) -> None:
        log = self.log_path(step.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with self._status(step.name) as show, log.open("wb") as sink:
            code = run_child(child_command(step.command), sink, lambda: show(last_progress(log)))
        if code:
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise SpdError(
                f"step {step.name} failed with exit code {code}; its log is {log}, which ends:\n"
                + "\n".join(tail[-LOG_LINES_SHOWN:])
            )

    @contextmanager
    def _status(self, name: str) -> Iterator[Callable[[str], None]]:
        """Shows the newest line of progress: a spinner on a terminal, lines elsewhere."""
        if self.console.is_terminal:
            with self.console.status(name) as status:
                yield lambda text: status.update(text.replace("[", r"\[") or name)
            return
        self.say(f"{name} ...")
        said_at, said = time.monotonic(), ""

        def show(text: str) -> None:
            nonlocal said_at, said
            if text not in ("", said) and time.monotonic() - said_at >= SAY_EVERY_S:
                said_at, said = time.monotonic(), text
                self.say(f"  {text}")

        yield show

    def _record_path(self, name: str) -> Path:
        return self.folder / "steps" / f"{name}.json"

    def _write(self, step: Step, inputs: str, *, done: bool, seconds: float) -> StepRecord:
        record = StepRecord(
            name=step.name, inputs=inputs, command=step.command, done=done, seconds=seconds
        )
        data = json.dumps(asdict(record), indent=1) + "\n"
        write_atomic(self._record_path(step.name), data.encode())
        return record


def child_command(arguments: Sequence[str]) -> list[str]:
    """`megatron-spd ARGUMENTS` under the running interpreter."""
    return [sys.executable, "-m", "megatron_spd", *arguments]


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """One thread a rank, and nothing that would make the child a rank of another launch."""
    kept = {name: value for name, value in environ.items() if name not in LAUNCH_VARIABLES}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run_child(command: Sequence[str], sink: Any, tick: Callable[[], None]) -> int:
    """Runs a process to its end, calling `tick` while it runs, and returns its exit code.

    Whatever ends this function ends the process too, with all that it started.
    """
    with ending_on_signals():
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=child_environment(os.environ),
            start_new_session=True,  # a Ctrl-C reaches this process alone, which ends the child
        )
        try:
            while child.poll() is None:
                time.sleep(POLL_S)
                tick()
            return child.returncode
        finally:
            end_tree(child)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    caught = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_tree(child: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
    """Ends a process and its descendants: politely, then, after `grace_s`, by force."""
    started = descendants(child.pid)
    if child.poll() is None:
        child.terminate()  # torchrun ends its ranks, which are in sessions of their own
        try:
            child.wait(timeout=grace_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            started |= descendants(child.pid)
            child.kill()
            child.wait()
    for process in started & processes().keys():
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@dataclass(frozen=True)
class Process:
    """A process; its start keeps it apart from a later one of the same number."""

    pid: int
    start_ticks: int


def descendants(pid: int) -> set[Process]:
    """Processes that `pid` started, and those that they did in turn."""
    parents = processes()
    found: set[Process] = set()
    wanted = {pid}
    while wanted:
        children = {process for process, parent in parents.items() if parent in wanted} - found
        found |= children
        wanted = {process.pid for process in children}
    return found


def processes() -> dict[Process, int]:
    """Every process that is not over, and its parent's number, from /proc."""
    found: dict[Process, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if fields[0] != "Z":
            found[Process(int(stat.parent.name), int(fields[19]))] = int(fields[1])
    return found


def last_progress(log: Path) -> str:
    """The newest line of progress in a log; "" if there is none."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 4096))
        lines = stream.read().decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if PROGRESS_LINE.match(line)), "")


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    return [path]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
