"""The golden files are what the code gives, and a changed one is seen."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def golden() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden", ROOT / "tools" / "golden.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_golden_files_hold(golden: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert golden.main(["check"]) == 0, capsys.readouterr().out


def test_a_change_is_seen(golden: ModuleType) -> None:
    text = (golden.FOLDER / "losses/tiny_20_steps.txt").read_text()
    step, loss = text.splitlines()[-1].split()
    assert not golden.same(text, text.replace(loss, f"{float(loss) * 1.01:.6f}"))
    assert not golden.same(text, text.replace(f"{step} {loss}\n", ""))
    grid = (golden.FOLDER / "schedules/n4_reject_at_7.txt").read_text()
    assert not golden.same(grid, grid.replace("7*", "7", 1))
