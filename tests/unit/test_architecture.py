"""The rules of the layout, read from the sources: layers, owners, budgets, prints, layer sums."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_spd"

# Lowest first. A module may import its own layer and the ones below; see APART for the exceptions.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"", "errors", "config", "stage_plan", "target_spec", "schedule", "planner"}),
    frozenset({"attention", "compat", "comm", "kv_rows", "sampling", "rope", "wave"}),
    frozenset({"model", "speculation", "checkpoint"}),
    frozenset({"inference", "training"}),
    frozenset({"server", "cli", "quickstart", "launcher", "__main__"}),
)
APART = (
    frozenset({"model", "speculation", "checkpoint"}),
    frozenset({"inference", "training"}),
)
ANYTHING = "testing"

OWNERS: dict[str, frozenset[str]] = {
    "torch.distributed": frozenset({"comm", "testing"}),
    "megatron": frozenset({"model", "training", "compat"}),
    "deepspeed": frozenset({"training"}),
    "transformers": frozenset({"checkpoint"}),
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def unit_of(module: str) -> str:
    """`megatron_spd.model.stage` -> `model`; the package itself -> ``."""
    return [*module.split("."), ""][1]


def layer_of(unit: str) -> int:
    return next((level for level, units in enumerate(LAYERS) if unit in units), -1)


def imports_of(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import, those inside functions too; relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")[: -node.level]
                base = ".".join([*parts, base] if base else parts)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def import_problems(tree: ast.AST, module: str) -> Iterator[str]:
    unit = unit_of(module)
    if layer_of(unit) < 0 and unit != ANYTHING:
        yield f"{module}: {unit!r} has no layer; add it to LAYERS"
    for line, name in imports_of(tree, module):
        for heavy, owners in OWNERS.items():
            if (name + ".").startswith(heavy + ".") and unit not in owners:
                yield f"{module}:{line} imports {name}, which belongs to {sorted(owners)}"
        if layer_of(unit) == 0 and (name + ".").startswith("torch."):
            yield f"{module}:{line} imports {name}, but the lowest layer is pure Python"
        if not (name + ".").startswith("megatron_spd.") or unit == ANYTHING:
            continue
        other = unit_of(name)
        if layer_of(other) < 0 and (other == ANYTHING or (PACKAGE / other).exists()):
            yield f"{module}:{line} imports {name}, which is for tests alone"
        elif layer_of(other) > layer_of(unit):
            yield f"{module}:{line} imports {name} from a higher layer"
        elif other != unit and any({unit, other} <= apart for apart in APART):
            yield f"{module}:{line} imports {name}, its neighbour"


def distributed_problems(tree: ast.AST, module: str) -> Iterator[str]:
    """`import torch` followed by `torch.distributed.x` names no import but is the same thing."""
    if unit_of(module) in OWNERS["torch.distributed"]:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield f"{module}:{node.lineno} uses torch.distributed, which belongs to comm"


def budget_problems(tree: ast.AST, module: str, source: str) -> Iterator[str]:
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{module} has {lines} lines, more than {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{module}:{node.lineno} {node.name} has {length} lines"


def print_problems(tree: ast.AST, module: str) -> Iterator[str]:
    if unit_of(module) == "__main__":
        return
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        ):
            yield f"{module}:{node.lineno} prints outside __main__.py"


def layer_sum_problems(tree: ast.AST, module: str) -> Iterator[str]:
    """`//`, `divmod` or the name `layers_per_stage` on layer counts, outside the one owner."""
    if unit_of(module) == "stage_plan":
        return
    for node in ast.walk(tree):
        name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", "")
        if name == "layers_per_stage":
            yield f"{module}:{node.lineno} has layers_per_stage"  # type: ignore[attr-defined]
        operands: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
            operands = [node.left, node.right]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "divmod":
            operands = node.args
        if any("layer" in word.lower() for part in operands for word in words_of(part)):
            yield f"{module}:{node.lineno} divides layers outside stage_plan.py"  # type: ignore[attr-defined]


def words_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def problems_of(source: str, module: str) -> list[str]:
    """Everything wrong with one module's source."""
    tree = ast.parse(source)
    return [
        *import_problems(tree, module),
        *distributed_problems(tree, module),
        *budget_problems(tree, module, source),
        *print_problems(tree, module),
        *layer_sum_problems(tree, module),
    ]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    # a package is named with its __init__ so that relative imports resolve from inside it
    return ".".join(parts) if len(parts) > 2 or parts[-1] != "__init__" else "megatron_spd"


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_module_keeps_the_rules(path: Path) -> None:
    assert problems_of(path.read_text(encoding="utf-8"), module_name(path)) == []


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_module_is_ascii(path: Path) -> None:
    assert path.read_bytes().isascii()


LONG_FUNCTION = "def f():\n" + "    a = 1\n" * MAX_FUNCTION_LINES


@pytest.mark.parametrize(
    ("module", "source", "said"),
    [
        ("megatron_spd.schedule.machine", "import torch", "pure Python"),
        ("megatron_spd.config", "from megatron_spd.comm import Channel", "higher layer"),
        ("megatron_spd.config", "from megatron_spd import comm", "higher layer"),
        ("megatron_spd.sampling", "from .model.stage import TargetStage", "higher layer"),
        ("megatron_spd.model.stage", "from ..inference import driver", "higher layer"),
        ("megatron_spd.model.stage", "import megatron_spd.speculation.module", "neighbour"),
        ("megatron_spd.inference.driver", "from megatron_spd.training import run", "neighbour"),
        ("megatron_spd.server.app", "from megatron_spd.testing import run_ranks", "for tests"),
        ("megatron_spd.model.stage", "import torch.distributed as dist", "belongs to"),
        ("megatron_spd.model.stage", "from torch import distributed", "belongs to"),
        ("megatron_spd.model.stage", "import torch\ntorch.distributed.barrier()", "belongs to"),
        ("megatron_spd.inference.driver", "from megatron.core import mpu", "belongs to"),
        ("megatron_spd.model.stage", "def f():\n    import deepspeed", "belongs to"),
        ("megatron_spd.model.stage", "import transformers", "belongs to"),
        ("megatron_spd.model.stage", "print(1)", "prints"),
        ("megatron_spd.model.stage", "a = plan.num_layers // 2", "divides layers"),
        ("megatron_spd.model.stage", "a = divmod(num_layers, n)", "divides layers"),
        ("megatron_spd.model.stage", "layers_per_stage = 3", "layers_per_stage"),
        ("megatron_spd.model.stage", LONG_FUNCTION, "f has 61 lines"),
        ("megatron_spd.model.stage", "a = 1\n" * 401, "401 lines"),
        ("megatron_spd.utilities", "a = 1", "has no layer"),
    ],
)
def test_checker_sees_a_planted_violation(module: str, source: str, said: str) -> None:
    found = problems_of(source, module)
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron_spd.stage_plan", "a = divmod(num_layers, 2)[0] + num_layers // 2"),
        ("megatron_spd.inference.driver", "from megatron_spd.model.stage import TargetStage"),
        ("megatron_spd.training.run", "import deepspeed\nfrom megatron.core import mpu"),
        ("megatron_spd.comm", "import torch.distributed as dist"),
        ("megatron_spd.testing", "from megatron_spd.inference import driver"),
        ("megatron_spd.model.stage", "a = num_heads // num_groups"),
        ("megatron_spd.__main__", "print(1)"),
        ("megatron_spd.model.__init__", "from .stage import TargetStage"),
        ("megatron_spd.cli.plan", "from megatron_spd import __version__"),
    ],
)
def test_checker_lets_the_rule_abiding_pass(module: str, source: str) -> None:
    assert problems_of(source, module) == []
