"""The engine over gloo ranks equals plain decoding, id for id, for every plan and drafter."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_spd.checkpoint.hf_folder import HfFolder
from megatron_spd.checkpoint.tokenizer import Tokenizer
from megatron_spd.inference.drafter import ScriptedDrafter
from megatron_spd.inference.driver import Driver
from megatron_spd.inference.engine import EngineOptions, build_stage, decode_on_ranks
from megatron_spd.inference.reference import decode_plain
from megatron_spd.inference.requests import Request
from megatron_spd.model.parallel import init_single_rank
from megatron_spd.sampling import SamplingParams
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
