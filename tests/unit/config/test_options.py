from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron_spd.config import (
    SECTIONS,
    ModuleOptions,
    PlanConfig,
    TrainOptions,
    load_config,
    read_toml,
)
from megatron_spd.errors import ConfigError, PlanError

FILE = """
[plan]
target = "models/some target"
num_stages = 4
taps = [0, 3]

[module]
aggregator = "concat"

[train]
data = "a.txt"
output = "runs/a"
learning_rate = 2e-4
joint = true
"""
ALL = ("plan", "module", "train")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def test_file_becomes_dataclasses(file: Path) -> None:
    loaded = load_config(file, sections=ALL)
    assert loaded.plan == PlanConfig(target="models/some target", num_stages=4, taps=(0, 3))
    assert loaded.module == ModuleOptions(aggregator="concat")
    assert loaded.train == TrainOptions(
        data="a.txt", output="runs/a", learning_rate=2e-4, joint=True
    )


def test_override_wins_over_the_file(file: Path) -> None:
    overrides = ["--plan.num_stages=2", "--plan.taps=[0,5]", "--train.joint", "false"]
    loaded = load_config(file, overrides, ALL)
    assert loaded.plan.num_stages == 2
    assert loaded.plan.taps == (0, 5)
    assert loaded.train.joint is False
    assert loaded.train.learning_rate == 2e-4


def test_only_the_wanted_sections_must_be_complete() -> None:
    loaded = load_config(None, ["--plan.target=t", "--plan.bounds=[0,2,5]"])
    assert loaded.plan == PlanConfig(target="t", bounds=(0, 2, 5))
    assert not hasattr(loaded, "train")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[plan]\nnum_stagse = 4", "plan.num_stagse"),
        ("[plans]\nnum_stages = 4", "'plans'"),
        ("num_stages = 4", "'num_stages'"),
        ("[train]\nstep = 4", "train.step"),
        ("[plan", "not valid TOML"),
    ],
)
def test_file_with_unknown_or_broken_entry_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_toml(path, ("plan",))
    assert caught.value.exit_code == 2


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_config(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--plan.num_stages=2"], "plan.target"),
        (["--plan.target=t", "--plan.num_stages=two"], "num_stages"),
        (["--plan.target=t", "--plan.num_stages=2", "--plan.stages=2"], "plan.stages"),
        (["--plan.target=t", "--plan.num_stages=2", "--plan.taps=[0,a]"], "taps"),
        (["--plan.target=t"], "not both or neither"),
        (["--plan.target=t", "--plan.num_stages=2", "--plan.bounds=[0,2]"], "not both"),
        (["--plan.target=t", "--plan.num_stages=-1"], "-1"),
    ],
)
def test_bad_override_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        load_config(None, overrides)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_steps", 0), ("sequence_tokens", 1), ("learning_rate", 0.0), ("gradient_clip", -1.0)],
)
def test_train_option_out_of_range_is_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        dataclasses.replace(TrainOptions(data="a", output="b"), **{field: value})


def test_build_even_and_explicit() -> None:
    even = PlanConfig(target="t", num_stages=2).build(5)
    assert even.bounds == (0, 3, 5)
    uneven = PlanConfig(target="t", bounds=(0, 1, 5), taps=(0, 5), module_own_rank=True).build(5)
    assert (uneven.bounds, uneven.taps, uneven.module_rank) == ((0, 1, 5), (0, 5), 2)


def test_build_refuses_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="end at 4 but the target has 5"):
        PlanConfig(target="t", bounds=(0, 4)).build(5)
    with pytest.raises(PlanError, match="6 stages"):
        PlanConfig(target="t", num_stages=6).build(5)


@pytest.mark.parametrize("section", SECTIONS)
def test_sections_are_frozen_and_keyword_only(section: str) -> None:
    cls = SECTIONS[section]
    assert cls.__dataclass_params__.frozen  # type: ignore[union-attr]
    assert all(field.kw_only for field in dataclasses.fields(cls))
