from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from megatron_spd.errors import ConfigError, SpdError
from megatron_spd.quickstart import steps
from megatron_spd.quickstart.steps import Job, Step, child_environment, last_progress, processes


class Writer:
    """A step of a made-up job: copies `source` and says how often it did."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.times = 0
        folder.mkdir(exist_ok=True)
        (folder / "source").write_text("a")

    def step(self, **settings: object) -> Step:
        return Step(
            name="copy",
            makes=("made",),
            reads=("source",),
            work=self.work,
            settings=tuple(settings.items()),
        )

    def work(self) -> None:
        self.times += 1
        made = self.folder / "made"
        made.mkdir(exist_ok=True)
        (made / str(self.times)).write_text((self.folder / "source").read_text())

    def made(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "made").iterdir())


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "job")


@pytest.fixture
def job(writer: Writer) -> Job:
    return Job(writer.folder, Console(file=io.StringIO()))


def test_second_run_skips_what_is_done(job: Job, writer: Writer) -> None:
    first = job.run(writer.step())
    assert first.done
    assert job.run(writer.step()) == first
    assert writer.times == 1


@pytest.mark.parametrize("change", ["input", "settings"])
def test_changed_inputs_start_from_nothing(job: Job, writer: Writer, change: str) -> None:
    job.run(writer.step(seed=0))
    if change == "input":
        (writer.folder / "source").write_text("b")
    job.run(writer.step(seed=0 if change == "input" else 1))
    assert writer.made() == ["2"]


def test_lost_result_is_made_again(job: Job, writer: Writer) -> None:
    job.run(writer.step())
    (writer.folder / "made" / "1").unlink()
    (writer.folder / "made").rmdir()
    job.run(writer.step())
    assert writer.made() == ["2"]


def test_step_that_was_cut_off_goes_on_with_its_files(job: Job, writer: Writer) -> None:
    def cut_off() -> None:
        writer.work()
        raise KeyboardInterrupt

    step = Step(name="copy", makes=("made",), reads=("source",), work=cut_off)
    with pytest.raises(KeyboardInterrupt):
        job.run(step)
    record = job.record("copy")
    assert record is not None and not record.done
    job.run(writer.step())
    assert writer.made() == ["1", "2"]


def test_files_of_another_origin_are_not_touched(job: Job, writer: Writer) -> None:
    writer.work()
    with pytest.raises(ConfigError, match="not written by this command"):
        job.run(writer.step())
    assert writer.made() == ["1"]


def test_step_must_write_what_it_names(job: Job) -> None:
    with pytest.raises(SpdError, match=r"step idle ended without writing .*nothing"):
        job.run(Step(name="idle", makes=("nothing",), work=lambda: None))


def test_failure_names_the_step_and_shows_its_log(job: Job) -> None:
    with pytest.raises(SpdError, match="step wrong failed with exit code 2") as caught:
        job.run(Step(name="wrong", makes=("nothing",), command=("plant",)))
    assert "unknown subcommand 'plant'" in str(caught.value)
    assert job.log_path("wrong").is_file()


def test_command_runs_in_a_process_of_its_own(job: Job) -> None:
    step = Step(name="version", makes=("logs/version.log",), command=("--version",))
    assert job.run(step).command == ("--version",)
    assert job.log_path("version").read_text().strip()


def test_child_is_not_a_rank_of_another_launch() -> None:
    environ = child_environment({"RANK": "1", "NNODES": "2", "HOME": "/home"})
    assert environ == {"HOME": "/home", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def test_newest_progress_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("warning\ntrain 1/9, 3 s, eta 24 s\ntrain 2/9, 6 s, eta 21 s  loss 1\nnoise\n")
    assert last_progress(log) == "train 2/9, 6 s, eta 21 s  loss 1"
    log.write_text("warning\n")
    assert last_progress(log) == ""


# A launcher like torchrun: its worker is in a session of its own and does not heed SIGTERM.
LAUNCHER = """
import os, subprocess, sys, time
worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
other = subprocess.Popen([sys.executable, "-c", worker], start_new_session=True)
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()} {other.pid} all")
time.sleep(600)
"""


def test_whatever_ends_the_wait_ends_all_processes(tmp_path: Path) -> None:
    said = tmp_path / "pids"

    def tick() -> None:
        if said.exists() and said.read_text().endswith("all"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        steps.run_child([sys.executable, "-c", LAUNCHER, str(said)], subprocess.DEVNULL, tick)
    pids = {int(word) for word in said.read_text().split()[:2]}
    deadline = time.monotonic() + 20
    while pids & running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2
    assert not pids & running()


def running() -> set[int]:
    """Processes of this machine that are not over."""
    return {process.pid for process in processes()}


def test_signals_end_the_block_like_ctrl_c() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), steps.ending_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) is handler
