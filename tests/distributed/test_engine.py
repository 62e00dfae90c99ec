"""The engine over gloo ranks equals plain decoding, id for id, for every plan and drafter."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spd.checkpoint.artifact import ArtifactMeta
from megatron_spd.checkpoint.hf_folder import HfFolder
from megatron_spd.checkpoint.stage_weights import load_final_norm, load_head
from megatron_spd.checkpoint.tokenizer import Tokenizer
from megatron_spd.inference.drafter import DraftRows, ModuleDrafter, ScriptedDrafter
from megatron_spd.inference.driver import Driver
from megatron_spd.inference.engine import (
    EngineOptions,
    build_module_drafter,
    build_stage,
    decode_on_ranks,
)
from megatron_spd.inference.reference import decode_plain
from megatron_spd.inference.requests import Request
from megatron_spd.model.parallel import init_single_rank
from megatron_spd.sampling import SamplingParams
from megatron_spd.speculation.config import ModuleConfig
from megatron_spd.speculation.module import SpeculationModule
from megatron_spd.stage_plan import StagePlan
from megatron_spd.testing import run_ranks

SHARED = Path(os.environ.get("SPD_SHARED", Path(__file__).resolve().parents[2] / ".." / "shared"))
STORIES = SHARED / "models" / "stories260k"
PROMPTS = SHARED / "eval" / "stories.jsonl"
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.7, top_p=0.9, seed=7),
)
NEW_TOKENS = 10

needs_stories = pytest.mark.skipif(
    not STORIES.exists(), reason="needs shared/models/stories260k beside the project"
)


def requests(num_prompts: int) -> list[Request]:
    tokenizer = Tokenizer(STORIES)
    lines = PROMPTS.read_text().splitlines()[:num_prompts]
    prompts = [tokenizer.encode(json.loads(line)["turns"][0]) for line in lines]
    return [
        Request(prompt_ids=tuple(ids), max_new_tokens=NEW_TOKENS, sampling=sampling)
        for ids in prompts
        for sampling in SAMPLINGS
    ]


def plain(num_prompts: int) -> list[tuple[int, ...]]:
    init_single_rank()
    folder = HfFolder(STORIES)
    plan = StagePlan.even(5, 1)
    stage = build_stage(folder, plan, 0, EngineOptions())
    return [
        decode_plain([stage], request, max_positions=512, decode=str, request_id=number).ids
        for number, request in enumerate(requests(num_prompts))
    ]


def plain_on_a_rank(rank: int, num_prompts: int) -> list[tuple[int, ...]]:
    return plain(num_prompts)


def decode_scripted(
    rank: int, plan_json: str, num_prompts: int, expected: list[tuple[int, ...]]
) -> list[dict[str, Any]] | None:
    plan = StagePlan.from_json(plan_json)
    asked = requests(num_prompts)
    script = ScriptedDrafter(1.0, vocab_size=512)

    def work(driver: Driver) -> list[dict[str, Any]]:
        found = []
        for share in (1.0, 0.0, 0.3):
            script.right_share = share
            for request, ids in zip(asked, expected, strict=True):
                start = len(request.prompt_ids)
                script.text = {start + place: token for place, token in enumerate(ids)}
                result = driver.run(request)
                found.append({"share": share, "ids": result.ids, **asdict(result.counters)})
        driver.machine.check_integrity()
        return found

    folder = HfFolder(STORIES)
    return decode_on_ranks(
        folder, plan, EngineOptions(chunk_tokens=8), drafter=lambda: script, decode=str, work=work
    )


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = run_ranks(plain_on_a_rank, 1, (2,))[0]
    return found


@needs_stories
@pytest.mark.parametrize("own_rank", [False, True])
@pytest.mark.parametrize("bounds", [(0, 5), (0, 2, 5), (0, 1, 3, 5), (0, 1, 2, 3, 4, 5)])
def test_every_plan_and_drafter_writes_the_targets_text(
    bounds: tuple[int, ...], own_rank: bool, expected: list[tuple[int, ...]]
) -> None:
    plan = StagePlan.from_bounds(bounds, module_own_rank=own_rank)
    found = run_ranks(decode_scripted, plan.world_size, (plan.to_json(), 2, expected))
    results = found[plan.module_rank]
    num_stages, committed = plan.num_stages, NEW_TOKENS - 1
    assert len(results) == 3 * len(expected)
    for place, result in enumerate(results):
        assert tuple(result["ids"]) == expected[place % len(expected)]
        if result["share"] == 1.0:
            assert result["cycles"] == committed + num_stages - 1
            assert (result["accepted"], result["rejected"]) == (committed, 0)
        if result["share"] == 0.0:
            assert result["cycles"] == committed * num_stages
            assert (result["accepted"], result["rejected"]) == (0, committed)


@needs_stories
@pytest.mark.parametrize("module_rank", [1, 2])
def test_the_module_may_live_beside_any_stage(
    module_rank: int, expected: list[tuple[int, ...]]
) -> None:
    plan = StagePlan(
        bounds=(0, 1, 3, 5), taps=(0, 1, 5), stage_ranks=(0, 1, 2), module_rank=module_rank
    )
    results = run_ranks(decode_scripted, 3, (plan.to_json(), 2, expected))[module_rank]
    assert [tuple(result["ids"]) for result in results] == expected * 3


def decode_with_random_module(
    rank: int, plan_json: str, expected: list[tuple[int, ...]]
) -> list[dict[str, Any]] | None:
    """The real drafter with untrained weights: nearly always wrong, so the pipe keeps refilling."""
    plan = StagePlan.from_json(plan_json)
    folder = HfFolder(STORIES)
    spec, options = folder.spec, EngineOptions(chunk_tokens=8)
    torch.manual_seed(0)
    config = ModuleConfig(
        hidden_size=spec.hidden_size,
        num_layers=2,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
        norm_eps=spec.norm_eps,
        rope=spec.rope,
        aggregator="shared",
        head="linear",
        draft_vocab_size=spec.vocab_size,
        bounds=plan.bounds,
        taps=plan.taps,
    )
    module = SpeculationModule(config, plan)
    module.init_from_target(load_head(folder), load_final_norm(folder))
    meta = ArtifactMeta.of(
        folder, plan, module=config.to_dict(), draft_ids=module.draft_ids.tolist()
    )
    seen: list[DraftRows] = []

    def drafter() -> ModuleDrafter:
        made = build_module_drafter(folder, plan, options, meta, module.state_dict())
        made.on_rows = seen.append
        return made

    def work(driver: Driver) -> list[dict[str, Any]]:
        found = []
        for request in requests(2):
            seen.clear()
            result = driver.run(request)
            worst = max(_difference_from_training(module, folder, result.ids, request, seen))
            found.append({"ids": result.ids, "difference": worst, **asdict(result.counters)})
        return found

    return decode_on_ranks(folder, plan, options, drafter=drafter, decode=str, work=work)


def _difference_from_training(
    module: SpeculationModule,
    folder: HfFolder,
    ids: tuple[int, ...],
    request: Request,
    seen: list[DraftRows],
) -> Iterator[float]:
    """|served - trained| draft logits at each moment, the trained ones from the whole text."""
    whole = StagePlan.from_bounds((0, 5), taps=module.plan.taps)
    stage = build_stage(folder, whole, 0, EngineOptions()).model
    for rows in seen:
        committed = [*request.prompt_ids, *ids][: rows.path[0].position + 1]
        tokens = torch.tensor([[*committed, *(node.token for node in rows.path[1:])]])
        positions = torch.arange(tokens.shape[1])[None]
        documents, fill = torch.zeros_like(positions), torch.full_like(positions, len(rows.path))
        with torch.no_grad():
            embedded = stage.embed(tokens)
            taps = stage.forward_text(embedded, positions, documents).taps
            moments = module.forward_moments(
                torch.stack([embedded, *taps], dim=2), positions, documents, fill
            )
            trained = module.logits(moments.hidden[0, -1, 0])
        yield float((trained - rows.logits).abs().max())


@needs_stories
@pytest.mark.parametrize("own_rank", [False, True])
def test_the_module_is_served_the_rows_it_is_trained_on(
    own_rank: bool, expected: list[tuple[int, ...]]
) -> None:
    plan = StagePlan.from_bounds((0, 1, 3, 5), module_own_rank=own_rank)
    found = run_ranks(decode_with_random_module, plan.world_size, (plan.to_json(), expected))
    results = found[plan.module_rank]
    assert [tuple(result["ids"]) for result in results] == expected
    assert sum(result["rejected"] for result in results) > 10
    assert max(result["difference"] for result in results) < 1e-4
