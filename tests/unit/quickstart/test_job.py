from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from megatron_spd.checkpoint import HfFolder, Tokenizer
from megatron_spd.config import SECTIONS, QuickstartOptions, load_config
from megatron_spd.errors import ConfigError
from megatron_spd.quickstart import job as quick
from megatron_spd.quickstart.job import NAMES, make_steps, start_spec, write_plain, write_start
from megatron_spd.quickstart.steps import Job, StepRecord

SMALL = {
    "text_bytes": 100_000,
    "vocab_size": 512,
    "num_layers": 2,
    "hidden_size": 64,
    "num_stages": 2,
    "num_prompts": 2,
    "num_texts": 2,
    "max_new_tokens": 4,
}


@pytest.fixture
def options(tmp_path: Path) -> QuickstartOptions:
    return QuickstartOptions(output=str(tmp_path / "quick"), **SMALL)


def test_steps_are_commands_whose_options_exist(options: QuickstartOptions) -> None:
    sections = {
        "train": ("plan", "module", "train"),
        "regenerate": ("plan", "regenerate"),
        "eval": ("plan", "eval"),
    }
    commands = [step.command for step in make_steps(options) if step.command]
    assert [command[0] for command in commands] == ["train", "regenerate", "train", "eval"]
    for command in commands:
        dotted = [word for word in command[1:] if word.startswith("--") and "." in word]
        loaded = load_config(None, dotted, sections[command[0]])
        assert isinstance(loaded.plan, SECTIONS["plan"])


def test_every_step_reads_what_an_earlier_one_made(options: QuickstartOptions) -> None:
    made: list[str] = []
    for step in make_steps(options):
        for name in step.reads:
            assert any(name == other or name.startswith(f"{other}/") for other in made), name
        made += step.makes
    assert len(set(made)) == len(made)


def test_start_and_plain_decoding(options: QuickstartOptions) -> None:
    folder = Path(options.output)
    job = Job(folder, Console(file=io.StringIO()))
    for step in make_steps(options)[:2]:
        job.run(step)
    start = HfFolder(folder / NAMES.start)
    assert start.spec == start_spec(options)
    assert Tokenizer(start.path).vocab_size == 512
    (folder / NAMES.joint).mkdir()
    (folder / NAMES.start).rename(folder / NAMES.target)
    write_plain(folder, options)
    plain = json.loads((folder / NAMES.plain).read_text())
    assert len(plain["results"]) == 2
    assert all(1 <= len(result["ids"]) <= 4 for result in plain["results"])


def test_start_is_a_function_of_the_seed(options: QuickstartOptions) -> None:
    folder = Path(options.output)
    (folder / NAMES.text).mkdir(parents=True)
    lines = [json.dumps({"text": f"def f{i}(x):\n    return x + {i}\n" * 9}) for i in range(99)]
    (folder / NAMES.train).write_text("\n".join(lines))
    hashes = []
    for _ in range(2):
        write_start(folder, options)
        hashes.append(HfFolder(folder / NAMES.start).hashes())
    assert hashes[0] == hashes[1]


def test_report_and_pictures_of_a_finished_folder(
    options: QuickstartOptions, made_up: SimpleNamespace
) -> None:
    folder = Path(options.output)
    files = {
        NAMES.evaluation: json.dumps(made_up.evaluation()),
        NAMES.plain: json.dumps(made_up.plain()),
        f"{NAMES.joint}/metrics.jsonl": _lines(made_up.metrics(20, joint=True)),
        f"{NAMES.distill}/metrics.jsonl": _lines(made_up.metrics(20, joint=False)),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    record = StepRecord(name="text", inputs="0", command=(), done=True, seconds=1.0)
    report = quick.read_report(folder, (record,))
    report.check()
    assert report.machine["cores"] >= 1
    quick.draw(folder)
    assert {path.name for path in folder.glob("*.png")} == {"training.png", "timeline.png"}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hidden_size": 96}, r"hidden_size \(96\) must be 64, 128"),
        ({"num_stages": 3}, r"num_stages \(3\) exceeds quickstart.num_layers \(2\)"),
        ({"num_joint_steps": 0}, "num_joint_steps"),
    ],
)
def test_options_out_of_range(wrong: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        QuickstartOptions(**{**SMALL, **wrong})


def _lines(records: list[dict[str, object]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)
