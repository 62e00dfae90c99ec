"""The stages against transformers' Llama on a real target, text-wise and row by row."""

import os
from pathlib import Path

import pytest
import torch

from megatron_spd.checkpoint.hf_folder import HfFolder
from megatron_spd.checkpoint.stage_weights import load_stage
from megatron_spd.kv_rows import KvRows
from megatron_spd.model import TargetStage, init_single_rank
from megatron_spd.stage_plan import StagePlan

SHARED = Path(os.environ.get("SPD_SHARED", Path(__file__).resolve().parents[4] / "shared"))
TARGET = SHARED / "models" / "stories260k"
PLANS = [
    StagePlan.from_bounds((0, 5), taps=(0, 1, 2, 3, 4, 5)),
    StagePlan.from_bounds((0, 1, 3, 5), taps=(0, 1, 2, 3, 4, 5)),
]
pytestmark = pytest.mark.skipif(not TARGET.exists(), reason=f"{TARGET} is not here")
LENGTH = 24


def stages_of(plan: StagePlan) -> list[TargetStage]:
    init_single_rank()
    folder = HfFolder(TARGET)
    stages = []
    for stage in range(plan.num_stages):
        built = TargetStage(folder.spec, plan, stage, torch.float32)
        built.load_state_dict(load_stage(folder, plan, stage, torch.float32), strict=True)
        stages.append(built.eval())
    return stages


@torch.no_grad()
def run_text(
    stages: list[TargetStage], tokens: torch.Tensor, documents: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    hidden = stages[0].embed(tokens)
    taps = [hidden]
    for stage in stages:
        out = stage.forward_text(hidden, positions, documents)
        hidden = out.hidden
        taps += out.taps
    return taps, stages[-1].logits(hidden)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(3, 512, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("plan", PLANS, ids=["n1", "n3"])
def test_text_matches_transformers(plan: StagePlan, tokens: torch.Tensor) -> None:
    from transformers import LlamaForCausalLM

    theirs = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    caught: list[torch.Tensor] = []
    theirs.model.norm.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.no_grad():
        want = theirs(tokens, output_hidden_states=True)
    taps, logits = run_text(stages_of(plan), tokens, torch.zeros_like(tokens))
    torch.testing.assert_close(logits, want.logits, rtol=1e-5, atol=1e-5)
    boundaries = [*want.hidden_states[:-1], caught[0]]
    assert len(taps) == len(boundaries) == 6
    for ours, other in zip(taps, boundaries, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plan", PLANS, ids=["n1", "n3"])
@torch.no_grad()
def test_rows_match_text(plan: StagePlan, tokens: torch.Tensor) -> None:
    stages, spec = stages_of(plan), HfFolder(TARGET).spec
    pools = [
        KvRows(len(plan.layers_of(s)), 40, spec.num_kv_heads, spec.head_dim, torch.float32)
        for s in range(plan.num_stages)
    ]
    want_taps, want = run_text(stages, tokens[:1], torch.zeros_like(tokens[:1]))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    for index in range(LENGTH):
        rows, positions = order[index : index + 1], torch.tensor([index])
        hidden = stages[0].embed(tokens[0, index : index + 1])
        taps = [hidden]
        for stage, kv in zip(stages, pools, strict=True):
            kv.insert(rows, positions)
            visible = kv.visible(rows, torch.tensor([3]), positions, torch.tensor([[-1]]))
            out = stage.forward_rows(hidden, positions, rows, visible, kv)
            kv.commit(rows, torch.tensor([3]))
            hidden = out.hidden
            taps += out.taps
        logits = stages[-1].logits(hidden)
        torch.testing.assert_close(logits[0], want[0, index], rtol=1e-5, atol=1e-5)
        for ours, other in zip(taps, want_taps, strict=True):
            torch.testing.assert_close(ours[0], other[0, index], rtol=1e-5, atol=1e-5)


def test_documents_do_not_see_each_other(tokens: torch.Tensor) -> None:
    stages = stages_of(PLANS[0])
    documents = torch.zeros_like(tokens)
    documents[:, 10:] = 1
    documents[:, 20:] = -1
    _, packed = run_text(stages, tokens, documents)
    changed = tokens.clone()
    changed[:, :10] = 5
    changed[:, 20:] = 6
    _, other = run_text(stages, changed, documents)
    torch.testing.assert_close(packed[:, 10:20], other[:, 10:20], rtol=1e-5, atol=1e-5)
    assert packed.isfinite().all()


def test_layer_numbers_and_trainable_flag() -> None:
    stages = stages_of(PLANS[1])
    numbers = [layer.layer_number for stage in stages for layer in stage.layers]
    assert numbers == [1, 2, 3, 4, 5]
    assert not any(p.requires_grad for stage in stages for p in stage.parameters())
    spec = HfFolder(TARGET).spec
    trained = TargetStage(spec, PLANS[1], 1, torch.float32, trainable=True)
    out = trained.forward_text(
        torch.randn(1, 4, 64), torch.arange(4)[None], torch.zeros(1, 4, dtype=torch.int64)
    )
    out.hidden.square().mean().backward()
    assert all(p.grad is not None for p in trained.parameters())
