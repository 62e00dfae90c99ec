"""Trees and repairs over gloo ranks write the target's own text, whatever enters and wherever."""

import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_spd.checkpoint.hf_folder import HfFolder
from megatron_spd.checkpoint.stage_weights import (
    load_embedding,
    load_final_norm,
    load_head,
)
from megatron_spd.checkpoint.tokenizer import Tokenizer
from megatron_spd.inference.drafter import DraftRows, ModuleDrafter
from megatron_spd.inference.driver import Driver
from megatron_spd.inference.engine import EngineOptions, build_stage, decode_on_ranks
from megatron_spd.inference.reference import decode_plain
from megatron_spd.inference.requests import Request
from megatron_spd.inference.tree_drafter import ScriptedTreeDrafter, TreeDrafter
from megatron_spd.model.parallel import init_single_rank
from megatron_spd.sampling import SamplingParams
from megatron_spd.schedule.machine import Machine, Node
from megatron_spd.schedule.tree import Opinion
from megatron_spd.speculation.config import ModuleConfig
from megatron_spd.speculation.module import SpeculationModule
from megatron_spd.stage_plan import StagePlan
from megatron_spd.testing import run_ranks

SHARED = Path(os.environ.get("SPD_SHARED", Path(__file__).resolve().parents[2] / ".." / "shared"))
STORIES = SHARED / "models" / "stories260k"
PROMPTS = SHARED / "eval" / "stories.jsonl"
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=1.0, seed=7))
WIDTHS = (1, 2, 4, 8)
NEW_TOKENS = 10
BOUNDS = {1: (0, 5), 2: (0, 2, 5), 3: (0, 1, 3, 5)}

pytestmark = pytest.mark.skipif(
    not STORIES.exists(), reason="needs shared/models/stories260k beside the project"
)


def requests() -> list[Request]:
    tokenizer = Tokenizer(STORIES)
    prompts = [json.loads(line)["turns"][0] for line in PROMPTS.read_text().splitlines()[:2]]
    return [
        Request(
            prompt_ids=tuple(tokenizer.encode(prompt)), max_new_tokens=NEW_TOKENS, sampling=sampling
        )
        for prompt in prompts
        for sampling in SAMPLINGS
    ]


def plain(rank: int) -> list[tuple[int, ...]]:
    init_single_rank()
    stage = build_stage(HfFolder(STORIES), StagePlan.even(5, 1), 0, EngineOptions())
    return [
        decode_plain([stage], request, max_positions=512, decode=str, request_id=number).ids
        for number, request in enumerate(requests())
    ]


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """The target's own text of every request."""
    found: list[tuple[int, ...]] = run_ranks(plain, 1)[0]
    return found


def whole_text(request: Request, ids: tuple[int, ...]) -> dict[int, int]:
    return dict(enumerate([*request.prompt_ids, *ids]))


def audited(driver: Driver, request: Request) -> dict[str, Any]:
    """Decode one request, look over the rows, and see that all come back."""
    result = driver.run(request)
    driver.machine.check_integrity()
    driver.drain()
    rows = driver.machine.rows
    return {"ids": result.ids, "left": rows.num_rows - rows.num_free, **asdict(result.counters)}


# ---- scripts: drafts at random places, early and late


class CountingDrafter(ScriptedTreeDrafter):
    """Counts the drafts of a run that were late siblings."""

    late = 0

    def _draft(self, machine: Machine, request: int, count: int) -> None:
        super()._draft(machine, request, count)
        self.late += sum(
            child.wave is None
            and child is not node.children[0]
            and node.children[0].wave is not None
            for node in machine.path(request)
            for child in node.children
        )


def decode_scripted(
    rank: int, num_stages: int, expected: list[tuple[int, ...]]
) -> list[dict[str, Any]] | None:
    script = CountingDrafter(0.5, width=1, repairs=False, vocab_size=512)

    def work(driver: Driver) -> list[dict[str, Any]]:
        found = []
        for width in WIDTHS:
            for script.repairs in (False, True):
                script.width = width
                for request, ids in zip(requests(), expected, strict=True):
                    script.text, script.late = whole_text(request, ids), 0
                    found.append(
                        {
                            "width": width,
                            "repairs": script.repairs,
                            **audited(driver, request),
                            "late": script.late,
                        }
                    )
        return found

    return decode_on_ranks(
        HfFolder(STORIES),
        StagePlan.from_bounds(BOUNDS[num_stages]),
        EngineOptions(chunk_tokens=8, width=max(WIDTHS), repairs=True),
        drafter=lambda: script,
        decode=str,
        work=work,
    )


@pytest.mark.parametrize("num_stages", BOUNDS)
def test_any_tree_writes_the_targets_text(num_stages: int, expected: list[tuple[int, ...]]) -> None:
    results = run_ranks(decode_scripted, num_stages, (num_stages, expected))[0]
    assert [result["ids"] for result in results] == expected * (2 * len(WIDTHS))
    for result in results:
        assert result["left"] == 0
        assert result["committed"] == NEW_TOKENS - 1
        assert result["late"] == 0 or result["repairs"]
    if num_stages > 1:
        wide = [result for result in results if result["width"] == 8]
        assert sum(result["accepted"] for result in wide) > 20
        assert sum(result["rejected"] for result in wide) > 4
        assert sum(result["late"] for result in wide) > 4


# ---- the module


class HelpedTree(TreeDrafter):
    """A tree whose module is told the truth at some moments, anew each cycle.

    Without dice it is told where the position is even, as a chain can be told too, and even a chain
    goes the way of a tree.
    """

    text: dict[int, int]
    dice: random.Random | None = None

    @property
    def _is_chain(self) -> bool:
        return False

    def _judge(
        self, live: Sequence[Node], logits: Tensor, sampling: SamplingParams
    ) -> dict[Node, Opinion]:
        for row, node in zip(logits, live, strict=True):
            told = node.position % 2 == 0 if self.dice is None else self.dice.random() < 0.4
            help_row(row, node, self.text, told=told)
        return super()._judge(live, logits, sampling)


def help_row(logits: Tensor, node: Node, text: dict[int, int], *, told: bool) -> None:
    if told and node.position + 1 in text:
        logits[text[node.position + 1]] += 20.0


def module_parts(
    folder: HfFolder, plan: StagePlan, options: EngineOptions
) -> tuple[SpeculationModule, Tensor]:
    torch.manual_seed(0)
    config = ModuleConfig.for_target(
        folder.spec, plan, num_layers=1, draft_vocab_size=folder.spec.vocab_size
    )
    module = SpeculationModule(config, plan)
    module.init_from_target(load_head(folder), load_final_norm(folder))
    return module.eval(), load_embedding(folder, options.dtype_of(folder.spec))


def decode_with_module(
    rank: int, expected: list[tuple[int, ...]]
) -> dict[str, list[dict[str, Any]]] | None:
    plan, folder = StagePlan.from_bounds(BOUNDS[3]), HfFolder(STORIES)
    options = EngineOptions(chunk_tokens=8, width=4, repairs=True)
    module, embedding = module_parts(folder, plan, options)

    def pool() -> Any:
        return options.pool(folder.spec, plan, 1, module.config)

    chain = ModuleDrafter(plan, module, embedding, pool())
    single = HelpedTree(plan, module, embedding, pool(), width=1, repairs=False)
    wide = HelpedTree(plan, module, embedding, pool(), width=4, repairs=True)
    leaves = HelpedTree(plan, module, embedding, pool(), width=4, repairs=False)
    wide.dice, leaves.dice = random.Random(1), random.Random(1)
    text: dict[int, int] = {}

    def tell(rows: DraftRows) -> None:
        help_row(rows.logits, rows.newest, text, told=rows.newest.position % 2 == 0)

    chain.on_rows = tell

    def work(driver: Driver) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        drafters = {"chain": chain, "single": single, "wide": wide, "leaves": leaves}
        for name, drafter in drafters.items():
            driver.drafter = drafter
            found[name] = []
            for request, ids in zip(requests(), expected, strict=True):
                text.clear()
                text.update(whole_text(request, ids))
                if isinstance(drafter, HelpedTree):
                    drafter.text = text
                found[name].append(audited(driver, request))
        kept = [len(drafter._taps) for drafter in drafters.values()]
        assert kept == [0] * len(kept), kept
        return found

    return decode_on_ranks(folder, plan, options, drafter=lambda: chain, decode=str, work=work)


def test_the_modules_tree_writes_the_targets_text_and_a_tree_of_one_is_the_chain(
    expected: list[tuple[int, ...]],
) -> None:
    found = run_ranks(decode_with_module, 3, (expected,))[0]
    for results in found.values():
        assert [result["ids"] for result in results] == expected
        assert all(result["left"] == 0 for result in results)
    judged = ("accepted", "rejected", "committed", "cycles")
    for chain, single in zip(found["chain"], found["single"], strict=True):
        assert [chain[name] for name in judged] == [single[name] for name in judged]
    totals = {
        name: {key: sum(result[key] for result in results) for key in judged}
        for name, results in found.items()
    }
    assert totals["chain"]["accepted"] > 8
    assert totals["chain"]["rejected"] > 8
    assert totals["wide"]["accepted"] > totals["chain"]["accepted"], totals
    assert totals["wide"]["cycles"] < totals["leaves"]["cycles"], totals
