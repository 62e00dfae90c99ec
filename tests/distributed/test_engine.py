"""The engine over gloo ranks equals plain decoding, id for id, for every plan and drafter."""

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
from megatron_spd.inference.requests import Request, Result
from megatron_spd.model.parallel import init_single_rank
from megatron_spd.sampling import SamplingParams
from megatron_spd.schedule.machine import Node
from megatron_spd.speculation.config import ModuleConfig
from megatron_spd.speculation.layers import rms_norm
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
NUM_PROMPTS = 2

needs_stories = pytest.mark.skipif(
    not STORIES.exists(), reason="needs shared/models/stories260k beside the project"
)


def requests(num_prompts: int = NUM_PROMPTS, new_tokens: int = NEW_TOKENS) -> list[Request]:
    tokenizer = Tokenizer(STORIES)
    lines = PROMPTS.read_text().splitlines()[:num_prompts]
    prompts = [tokenizer.encode(json.loads(line)["turns"][0]) for line in lines]
    return [
        Request(prompt_ids=tuple(ids), max_new_tokens=new_tokens, sampling=sampling)
        for ids in prompts
        for sampling in SAMPLINGS
    ]


def plain(rank: int, asked: list[Request]) -> list[tuple[int, ...]]:
    init_single_rank()
    stage = build_stage(HfFolder(STORIES), StagePlan.even(5, 1), 0, EngineOptions())
    return [
        decode_plain([stage], request, max_positions=512, decode=str, request_id=number).ids
        for number, request in enumerate(asked)
    ]


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """The target's own text of every request, then that of the one long request."""
    found: list[tuple[int, ...]] = run_ranks(plain, 1, ([*requests(), long_request()],))[0]
    return found


def decode_scripted(
    rank: int, plans: list[str], expected: list[tuple[int, ...]]
) -> list[list[dict[str, Any]] | None]:
    """Several plans of one world size, one after the other in the same processes."""
    return [_decode_scripted(StagePlan.from_json(plan), expected) for plan in plans]


def _decode_scripted(
    plan: StagePlan, expected: list[tuple[int, ...]]
) -> list[dict[str, Any]] | None:
    script = ScriptedDrafter(1.0, vocab_size=512)

    def work(driver: Driver) -> list[dict[str, Any]]:
        found = []
        for share in (1.0, 0.0, 0.3):
            script.right_share = share
            for request, ids in zip(requests(), expected, strict=True):
                start = len(request.prompt_ids)
                script.text = {start + place: token for place, token in enumerate(ids)}
                result = driver.run(request)
                found.append({"share": share, "ids": result.ids, **asdict(result.counters)})
        driver.machine.check_integrity()
        return found

    folder, options = HfFolder(STORIES), EngineOptions(chunk_tokens=8)
    return decode_on_ranks(folder, plan, options, drafter=lambda: script, decode=str, work=work)


def placed(*bounds: int, module_rank: int | None = None, own_rank: bool = False) -> StagePlan:
    plan = StagePlan.from_bounds(bounds, module_own_rank=own_rank)
    return plan if module_rank is None else replace(plan, taps=(0, 1, 5), module_rank=module_rank)


PLANS = {
    1: [placed(0, 5)],
    2: [placed(0, 5, own_rank=True), placed(0, 2, 5)],
    3: [
        placed(0, 2, 5, own_rank=True),
        placed(0, 1, 3, 5),
        placed(0, 1, 3, 5, module_rank=1),
        placed(0, 1, 3, 5, module_rank=2),
    ],
    4: [placed(0, 1, 3, 5, own_rank=True)],
    5: [placed(0, 1, 2, 3, 4, 5)],
    6: [placed(0, 1, 2, 3, 4, 5, own_rank=True)],
}
"""Plans by the ranks they need: the module beside each stage and on a rank of its own."""


@needs_stories
@pytest.mark.parametrize("world_size", PLANS)
def test_every_plan_and_drafter_writes_the_targets_text(
    world_size: int, expected: list[tuple[int, ...]]
) -> None:
    plans, texts = PLANS[world_size], expected[:-1]
    assert all(plan.world_size == world_size for plan in plans)
    found = run_ranks(decode_scripted, world_size, ([plan.to_json() for plan in plans], texts))
    for place, plan in enumerate(plans):
        check_scripted(plan, found[plan.module_rank][place], texts)


def check_scripted(
    plan: StagePlan, results: list[dict[str, Any]], expected: list[tuple[int, ...]]
) -> None:
    num_stages, committed = plan.num_stages, NEW_TOKENS - 1
    assert [tuple(result["ids"]) for result in results] == expected * 3
    for result in results:
        if result["share"] == 1.0:
            assert result["cycles"] == committed + num_stages - 1
            assert (result["accepted"], result["rejected"]) == (committed, 0)
        if result["share"] == 0.0:
            assert result["cycles"] == committed * num_stages
            assert (result["accepted"], result["rejected"]) == (0, committed)


# ---- rows: what the module reads while it serves is what it reads while it is trained

LONG = 64
ROWS_PLAN = (0, 1, 3, 5)


def long_request() -> Request:
    return requests(1, LONG)[1]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One draft as it was served."""

    tokens: list[int]
    """The committed text up to the root, then the tokens in flight behind it."""
    features: Tensor
    """[F, H], root first."""
    depths: tuple[int, ...]
    logits: Tensor
    """[V]: the draft's logit of each token, -inf of those it cannot draft."""


def random_module(folder: HfFolder, plan: StagePlan) -> SpeculationModule:
    """Random layers, and a head over a shuffled part of the vocabulary."""
    spec = folder.spec
    torch.manual_seed(0)
    config = ModuleConfig.for_target(
        spec, plan, num_layers=2, draft_vocab_size=spec.vocab_size - 12
    )
    module = SpeculationModule(config, plan, torch.randperm(spec.vocab_size)[:-12])
    module.init_from_target(load_head(folder), load_final_norm(folder))
    return module


def serve_module(
    rank: int, plan_json: str, short: list[tuple[int, ...]], text: tuple[int, ...]
) -> dict[str, Any] | None:
    """Decodes with a module whose drafts are helped to the truth half of the time."""
    plan, folder = StagePlan.from_json(plan_json), HfFolder(STORIES)
    module, options = random_module(folder, plan), EngineOptions(chunk_tokens=8)
    meta = ArtifactMeta.of(
        folder, plan, module=module.config.to_dict(), draft_ids=module.draft_ids.tolist()
    )
    request = long_request()
    whole = [*request.prompt_ids, *text]

    def drafter() -> ModuleDrafter:
        return build_module_drafter(folder, plan, options, meta, module.state_dict())

    def serve(driver: Driver, faulty: ModuleDrafter) -> tuple[list[Moment], Result]:
        coin, seen = random.Random(3), list[Moment]()

        def help_and_keep(rows: DraftRows) -> None:
            committed = whole[: rows.path[0].position + 1]
            tokens = [*committed, *(node.token for node in rows.path[1:])]
            logits = by_token(rows.logits, faulty._module)
            features = rows.features.clone()
            seen.append(Moment(tokens=tokens, features=features, depths=rows.depths, logits=logits))
            ids = faulty._module.draft_ids
            truth = (ids == whole[rows.newest.position + 1]).nonzero()
            if len(truth) and coin.random() < 0.5:
                rows.logits[int(truth)] += 1000.0  # the very tensor the draft is chosen from

        faulty.on_rows = help_and_keep
        driver.drafter = faulty
        return seen, driver.run(request)

    def work(driver: Driver) -> dict[str, Any]:
        same = [driver.run(short_request).ids for short_request in requests()] == short
        differences, kept = {}, None
        for name, plant in FAULTS.items():
            faulty = drafter()
            plant(faulty, folder, whole)
            seen, result = serve(driver, faulty)
            same &= result.ids == text
            # what is still in flight is dead; of the request itself nothing is kept
            same &= not faulty._complete and not faulty._taps
            differences[name] = compare(module, folder, seen)
            kept = kept or (seen, result)
        assert kept is not None
        return {
            "same": same,
            "moments": kept[0],
            "differences": differences,
            **asdict(kept[1].counters),
        }

    return decode_on_ranks(folder, plan, options, drafter=drafter, decode=str, work=work)


def by_token(logits: Tensor, module: SpeculationModule) -> Tensor:
    """Draft logits [.., Vd] as [.., V], in the order of the vocabulary."""
    wide = logits.new_full((*logits.shape[:-1], module.config.vocab_size), -torch.inf)
    wide[..., module.draft_ids] = logits
    return wide


def compare(
    module: SpeculationModule, folder: HfFolder, seen: Sequence[Moment]
) -> tuple[float, float]:
    """Largest |served - trained| feature and draft logit; the trained ones in one batch."""
    whole = StagePlan.from_bounds((0, 5), taps=module.plan.taps)
    stage = build_stage(folder, whole, 0, EngineOptions()).model
    lengths = torch.tensor([len(moment.tokens) for moment in seen])
    tokens = torch.zeros(len(seen), int(lengths.max()), dtype=torch.int64)
    for place, moment in enumerate(seen):
        tokens[place, : len(moment.tokens)] = torch.tensor(moment.tokens)
    index = torch.arange(tokens.shape[1]).expand_as(tokens)
    documents = torch.where(index < lengths[:, None], 0, -1)
    fill = torch.tensor([len(moment.depths) for moment in seen])[:, None].expand_as(tokens)
    with torch.no_grad():
        embedded = stage.embed(tokens)
        taps = torch.stack([embedded, *stage.forward_text(embedded, index, documents).taps], dim=2)
        hidden = module.forward_moments(taps, index, documents, fill).hidden[:, :, 0]
        trained = by_token(module.logits(hidden[torch.arange(len(seen)), lengths - 1]), module)
        served = torch.stack([moment.logits for moment in seen])
        features = max(
            float((module.features(taps[place, at], depth) - row).abs().max())
            for place, moment in enumerate(seen)
            for row, depth, at in zip(
                moment.features,
                moment.depths,
                range(len(moment.tokens) - len(moment.depths), len(moment.tokens)),
                strict=True,
            )
        )
    draftable = trained.isfinite()
    assert torch.equal(draftable, served.isfinite())
    return features, float((served - trained)[draftable].abs().max())


def shift_positions(drafter: ModuleDrafter, folder: HfFolder, text: Sequence[int]) -> None:
    """A row reads the token before its own."""
    right = drafter._feature

    def shifted(node: Node, depth: int) -> Tensor:
        taps = drafter._node_taps(node)
        before = node.parent.token if node.parent is not None else text[node.position - 1]
        own, taps[0] = taps[0].clone(), drafter._embedding[before]
        feature = right(node, depth)
        taps[0] = own
        return feature

    drafter._feature = shifted  # type: ignore[method-assign]


def norm_the_last_boundary(drafter: ModuleDrafter, folder: HfFolder, text: Sequence[int]) -> None:
    """Boundary L comes normed, as transformers lists it."""
    right, weight = drafter.observe, load_final_norm(folder)

    def observe(nodes: Sequence[Node], stage: int, taps: Tensor | None) -> None:
        if stage == 2 and taps is not None:
            normed = rms_norm(taps[-1], weight, folder.spec.norm_eps)
            taps = torch.cat([taps[:-1], normed[None]])
        right(nodes, stage, taps)

    drafter.observe = observe  # type: ignore[method-assign]


def permute_draft_ids(drafter: ModuleDrafter, folder: HfFolder, text: Sequence[int]) -> None:
    drafter._module.set_draft_ids(drafter._module.draft_ids.sort().values)


FAULTS: dict[str, Callable[[ModuleDrafter, HfFolder, Sequence[int]], None]] = {
    "none": lambda drafter, folder, text: None,
    "position shifted by one": shift_positions,
    "final norm on the last tap": norm_the_last_boundary,
    "permuted draft ids": permute_draft_ids,
}
"""What a test of rows must notice, each planted in the drafter that serves."""


@needs_stories
@pytest.mark.parametrize("own_rank", [False, True])
def test_the_module_is_served_the_rows_it_is_trained_on(
    own_rank: bool, expected: list[tuple[int, ...]]
) -> None:
    plan = placed(*ROWS_PLAN, own_rank=own_rank)
    args = (plan.to_json(), expected[:-1], expected[-1])
    found = run_ranks(serve_module, plan.world_size, args)[plan.module_rank]
    assert found["same"]
    assert found["accepted"] > 10
    assert found["rejected"] > 10
    assert {len(moment.depths) for moment in found["moments"]} == {1, 2, 3}
    assert max(found["differences"]["none"]) < 1e-5
    for fault in FAULTS:
        assert fault == "none" or max(found["differences"][fault]) > 1e-2, fault
