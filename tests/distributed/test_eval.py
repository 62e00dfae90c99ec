"""Served acceptance against the training forward's walk over the same texts, flag by flag."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_spd import comm
from megatron_spd.checkpoint.artifact import ArtifactMeta, load_artifact, save_artifact
from megatron_spd.checkpoint.hf_folder import HfFolder
from megatron_spd.checkpoint.stage_weights import load_final_norm, load_head
from megatron_spd.checkpoint.tokenizer import Tokenizer
from megatron_spd.cli.evaluate import evaluate
from megatron_spd.config import EvalOptions, PlanConfig
from megatron_spd.inference.driver import Driver
from megatron_spd.inference.engine import (
    EngineOptions,
    build_compute,
    build_module_drafter,
    build_stage,
    decode_on_ranks,
    join_plan,
)
from megatron_spd.inference.reference import decode_plain
from megatron_spd.inference.requests import Request
from megatron_spd.inference.timeline import Timeline
from megatron_spd.model.parallel import init_single_rank
from megatron_spd.sampling import SamplingParams
from megatron_spd.speculation.config import ModuleConfig
from megatron_spd.speculation.losses import distillation_loss
from megatron_spd.speculation.module import SpeculationModule
from megatron_spd.stage_plan import StagePlan
from megatron_spd.testing import run_ranks
from megatron_spd.training.agreement import DecodedText, TextChain, judge_text, rows_of
from megatron_spd.training.pipeline import StreamedStage

SHARED = Path(os.environ.get("SPD_SHARED", Path(__file__).resolve().parents[2] / ".." / "shared"))
STORIES = SHARED / "models" / "stories260k"
PROMPTS = SHARED / "eval" / "stories.jsonl"
BOUNDS = (0, 1, 3, 5)
NEW_TOKENS = 40
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=1.0, seed=7))

pytestmark = pytest.mark.skipif(
    not STORIES.exists(), reason="needs shared/models/stories260k beside the project"
)


def requests() -> list[Request]:
    tokenizer = Tokenizer(STORIES)
    turns = [json.loads(line)["turns"][0] for line in PROMPTS.read_text().splitlines()[:2]]
    return [
        Request(
            prompt_ids=tuple(tokenizer.encode(turn)), max_new_tokens=NEW_TOKENS, sampling=sampling
        )
        for turn in turns
        for sampling in SAMPLINGS
    ]


def train_a_little(rank: int, output: str) -> None:
    """A module after a few steps on texts of the target: right sometimes, far from always."""
    init_single_rank()
    torch.manual_seed(0)
    folder, plan = HfFolder(STORIES), StagePlan.from_bounds(BOUNDS)
    spec = folder.spec
    config = ModuleConfig.for_target(spec, plan, draft_vocab_size=spec.vocab_size - 12)
    module = SpeculationModule(config, plan, torch.randperm(spec.vocab_size)[12:])
    module.init_from_target(load_head(folder), load_final_norm(folder))
    compute = build_stage(folder, StagePlan.from_bounds((0, 5), taps=plan.taps), 0, EngineOptions())
    ids = [
        (*request.prompt_ids, *decode_plain([compute], request, max_positions=512, decode=str,
                                            request_id=number).ids)
        for number, request in enumerate(requests()[1::2])
    ]  # fmt: skip
    length = min(map(len, ids))
    rows = rows_of([0] * length, len(ids))
    tokens = torch.tensor([text[:length] for text in ids])
    with torch.no_grad():
        embedded = compute.model.embed(tokens)
        out = compute.model.forward_text(embedded, rows.positions, rows.documents)
    taps = torch.stack([embedded, *out.taps], dim=2)
    optimizer = torch.optim.Adam(module.parameters(), lr=2e-3)
    for _ in range(25):
        fill = torch.randint(1, plan.num_stages + 1, tokens.shape)
        moments = module.forward_moments(taps, rows.positions, rows.documents, fill)
        student, teacher = moments.hidden[:, :, 0].flatten(0, 1), out.hidden.flatten(0, 1)
        sums = distillation_loss(
            student, module.logits, teacher, torch.no_grad()(compute.model.logits),
            module.draft_ids, torch.ones(len(student)), kind="kl", acceptance=0.5,
        )  # fmt: skip
        optimizer.zero_grad()
        (sums.loss / len(student)).backward()
        optimizer.step()
    meta = ArtifactMeta.of(
        folder, plan, module=config.to_dict(), draft_ids=module.draft_ids.tolist()
    )
    save_artifact(output, meta, module.state_dict())


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> str:
    output = str(tmp_path_factory.mktemp("module"))
    run_ranks(train_a_little, 1, (output,))
    return output


def served_and_walked(rank: int, plan_json: str, artifact: str) -> list[dict[str, Any]] | None:
    """Decodes, then walks: the flags of both, and of a walk with each fault planted."""
    plan, folder, options = StagePlan.from_json(plan_json), HfFolder(STORIES), EngineOptions()
    meta, tensors = load_artifact(artifact)

    def work(driver: Driver) -> list[dict[str, Any]]:
        found = []
        for request in requests():
            driver.timeline = Timeline(plan.num_stages)
            result = driver.run(request)
            assert len(driver.timeline.flags) == len(result.ids) - 1
            found.append({"ids": result.ids, "flags": driver.timeline.flags})
            grid = driver.timeline.to_dict()
            fates = [node["fate"] for wave in grid["waves"] for node in wave["nodes"]]
            assert fates.count("prompt") == len(request.prompt_ids) + 1
            assert fates.count("rejected") == result.counters.rejected
            found[-1]["counters"] = asdict(result.counters)
        return found

    join_plan(plan)
    compute = build_compute(folder, plan, options)
    served = decode_on_ranks(
        folder,
        plan,
        options,
        drafter=lambda: build_module_drafter(folder, plan, options, meta, tensors),
        decode=str,
        work=work,
        compute=compute,
    )
    texts = json.loads(comm.current_world().gather(json.dumps(served))[plan.module_rank])
    width = folder.spec.hidden_size
    stage = None if compute is None else compute.model
    streamed = None if stage is None else StreamedStage(stage, plan, stage.stage, width)
    chain = TextChain(plan, rank, streamed, hidden_size=width, dtype=torch.float32)
    module = SpeculationModule(ModuleConfig.from_dict(meta.module), plan)
    module.load_state_dict(tensors)
    walked = []
    for request, text in zip(requests(), texts, strict=True):
        whole = DecodedText(
            ids=(*request.prompt_ids, *text["ids"]), prompt_tokens=len(request.prompt_ids)
        )
        taps = chain.taps(whole.ids)
        if taps is not None:
            walked.append(
                {
                    **text,
                    "walk": judge_text(module, taps, whole, request.sampling),
                    **{name: walk(module, taps, whole, request) for name, walk in FAULTS.items()},
                }
            )
    return walked or None


def walk_shifted(
    module: SpeculationModule, taps: Tensor, text: DecodedText, request: Request
) -> list[bool]:
    return judge_text(module, taps.roll(1, dims=1), text, request.sampling)


def walk_always_full(
    module: SpeculationModule, taps: Tensor, text: DecodedText, request: Request
) -> list[bool]:
    return judge_text(always(module, module.plan.num_stages), taps, text, request.sampling)


def always(module: SpeculationModule, fill: int) -> Any:
    """The module, but in a pipe that is never refilled."""

    class Full:
        plan, draft_ids, logits = module.plan, module.draft_ids, module.logits
        parameters = module.parameters

        def forward_moments(self, *args: Tensor) -> Any:
            *rest, fills = args
            return module.forward_moments(*rest, torch.full_like(fills, fill))

    return Full()


FAULTS: dict[str, Callable[..., list[bool]]] = {
    "positions shifted by one": walk_shifted,
    "fill always n": walk_always_full,
}


def mismatches(results: Sequence[dict[str, Any]], walk: str) -> int:
    return sum(
        served != trained
        for result in results
        for served, trained in zip(result["flags"], result[walk], strict=True)
    )


@pytest.mark.parametrize("own_rank", [False, True])
def test_serving_is_right_where_training_is(own_rank: bool, artifact: str) -> None:
    plan = StagePlan.from_bounds(BOUNDS, module_own_rank=own_rank)
    found = run_ranks(served_and_walked, plan.world_size, (plan.to_json(), artifact))
    results = found[plan.module_rank]
    flags = [flag for result in results for flag in result["flags"]]
    assert len(flags) == len(SAMPLINGS) * 2 * (NEW_TOKENS - 1)
    assert 0.05 < sum(flags) / len(flags) < 0.95
    for result in results:
        counters = result["counters"]
        assert counters["accepted"] == sum(result["flags"])
        assert counters["rejected"] == len(result["flags"]) - sum(result["flags"])
    assert mismatches(results, "walk") <= 1
    for fault in FAULTS:
        assert mismatches(results, fault) > 1, fault


def evaluate_on(rank: int, plan: PlanConfig, options: EvalOptions, path: str) -> dict[str, Any]:
    report = evaluate(plan, options, ["eval"], path)
    if report is None:
        return {}
    report.check()
    report.to_table()
    return dict(report.facts)


def test_the_report_adds_up(artifact: str, tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    plan = PlanConfig(target=str(STORIES), bounds=BOUNDS)
    options = EvalOptions(
        prompts=str(PROMPTS), module=artifact, num_prompts=2, max_new_tokens=20, tolerance=0.03
    )
    run_ranks(evaluate_on, 3, (plan, options, str(path)))
    facts = json.loads(path.read_text())
    assert facts["num_prompts"] == len(facts["results"]) == 2
    assert facts["agreement_judged"] == facts["accepted"] + facts["rejected"] == 2 * 19
    assert facts["committed"] == 2 * 19
    assert abs(facts["agreement"] - facts["acceptance"]) <= 0.03
    low, high = facts["interval"]
    assert low < facts["acceptance"] < high
    assert facts["eal"] == 3 * facts["committed"] / facts["cycles"]
    assert [rank["layers"] for rank in facts["ranks"]] == [[0, 1], [1, 3], [3, 5]]
    assert [rank["module"] for rank in facts["ranks"]] == [True, False, False]
    assert len({rank["waves"] for rank in facts["ranks"]}) == 1
    assert facts["timeline"]["waves"][0]["cycle"] == 0
    assert all(result["agreement"] is not None for result in facts["results"])
