"""Launches of the program as a user starts it, and the processes that belong to one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("SPD_SHARED", ROOT / ".." / "shared"))
MEETING_S = 150.0
"""Starting the ranks is mostly imports, slow where many tests share a core."""


@dataclass
class Ended:
    """What a launch left."""

    code: int
    out: str
    err: str
    seconds: float


@dataclass
class Launch:
    """A running `megatron-spd ARGV`; its ranks are found by what their launcher told them."""

    process: subprocess.Popen[str]
    folder: Path
    known: dict[int, int] = field(default_factory=dict)
    """rank -> process, as seen so far."""

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks by rank, those alive now."""
        alive = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (path / "environ").read_bytes().split(b"\0")
                if f"SPD_LAUNCHER_PID={self.process.pid}".encode() not in words:
                    continue
                rank = next((word[5:] for word in words if word.startswith(b"RANK=")), None)
                if rank is not None:
                    alive[int(rank)] = int(path.name)
        self.known.update(alive)
        return alive

    def wait_for_ranks(self, count: int) -> dict[int, int]:
        """The ranks once all were started."""
        return self._until(lambda: found if len(found := self.ranks()) == count else None)

    def wait_until_met(self, count: int) -> dict[int, int]:
        """The ranks once all joined their process group: gloo has a thread in each."""

        def met() -> dict[int, int] | None:
            found = self.ranks()
            joined = [pid for pid in found.values() if "pt_gloo_runloop" in thread_names(pid)]
            return found if len(joined) == count else None

        return self._until(met)

    def end(self, timeout_s: float) -> Ended:
        """Wait for the end, which must come within `timeout_s`."""
        begin = time.monotonic()
        out, err = self.process.communicate(timeout=timeout_s)
        return Ended(self.process.returncode, out, err, time.monotonic() - begin)

    def left_over(self) -> list[str]:
        """Processes and folders of this launch that are still there."""
        pids = [pid for pid in {*self.known.values(), *self.ranks().values()} if is_alive(pid)]
        names = [path.name for path in self.folder.iterdir()]
        # torch keeps an empty cache for its compiler there, one for all runs
        ours = [name for name in names if not name.startswith("torchinductor_")]
        return [*(f"process {pid}" for pid in pids), *ours]

    def _until(self, look: Callable[[], T | None]) -> T:
        limit = time.monotonic() + MEETING_S
        while time.monotonic() < limit:
            found = look()
            if found is not None:
                return found
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.1)
        raise AssertionError(f"the ranks did not start within {MEETING_S} s")


@contextmanager
def launched(argv: Sequence[str], folder: Path, **environ: str) -> Iterator[Launch]:
    """`megatron-spd ARGV` in a process group of its own, its temporary files under `folder`."""
    folder.mkdir(exist_ok=True)
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NNODES", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_spd", *argv],
        env={
            **inherited,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
            **environ,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    launch = Launch(process, folder)
    try:
        yield launch
    finally:
        for pid in {process.pid, *launch.ranks().values(), *launch.known.values()}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def thread_names(pid: int) -> set[str]:
    """The names of a process's threads."""
    names = set()
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").iterdir():
            names.add((path / "comm").read_text().strip())
    return names
