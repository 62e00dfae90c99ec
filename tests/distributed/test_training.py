"""Distillation over gloo ranks: bit-exact resume, a frozen target, gradients that ignore the cut.

The stages and the module here are small stand-ins with the real ones' interfaces, so that what is
tested is the streaming, the drawing of fills, the engine and the checkpoints.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megatron_spd import comm
from megatron_spd.config import TrainOptions
from megatron_spd.errors import CheckpointError, CommError, ConfigError, SpdError
from megatron_spd.model.stage import TargetStage
from megatron_spd.speculation.config import ModuleConfig
from megatron_spd.speculation.module import SpeculationModule
from megatron_spd.stage_plan import StagePlan
from megatron_spd.target_spec import RopeSpec, TargetSpec
from megatron_spd.testing import run_ranks
from megatron_spd.training import checkpointing
from megatron_spd.training.data import PackedRows, PackedText
from megatron_spd.training.distill import (
    Distillation,
    DrawnStep,
    RowLoss,
    count_rows,
    draw_fill,
    row_loss_of,
)
from megatron_spd.training.loop import StepReport, batches_of, distill
from megatron_spd.training.pipeline import Arrived, StreamedStage, start_pipeline, stream

HIDDEN, VOCAB, LAYERS = 8, 16, 6
PLAN = StagePlan.from_bounds((0, 2, 4, 6))


class Text(NamedTuple):
    hidden: Tensor
    taps: tuple[Tensor, ...]


class Rows(NamedTuple):
    hidden: Tensor
    valid: Tensor


class Stage(nn.Module):
    """Layers that mix a token with the one before it; the same weights however they are cut."""

    def __init__(self, plan: StagePlan, index: int) -> None:
        super().__init__()
        self.plan, self.index = plan, index
        generator = torch.Generator().manual_seed(1)
        drawn = [torch.randn(HIDDEN, HIDDEN, generator=generator) / 4 for _ in range(LAYERS)]
        self.layers = nn.ParameterList([drawn[layer] for layer in plan.layers_of(index)])
        self.table = nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def forward_text(self, hidden: Tensor, positions: Tensor, documents: Tensor) -> Text:
        taps = []
        for layer, weight in zip(self.plan.layers_of(self.index), self.layers, strict=True):
            before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
            before = before * (positions > 0).unsqueeze(-1)
            hidden = hidden + torch.tanh((hidden + before) @ weight)
            if layer + 1 in self.plan.taps:
                taps.append(hidden)
        return Text(hidden, tuple(taps))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.table.T


class Module(nn.Module):
    """One linear a depth over the taps known there."""

    def __init__(self, plan: StagePlan) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.plan = plan
        self.aggregate = nn.ModuleList(
            nn.Linear(len(plan.taps_known_at(depth)) * HIDDEN, HIDDEN)
            for depth in range(plan.num_stages)
        )
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward_moments(
        self, taps: Tensor, positions: Tensor, documents: Tensor, fill: Tensor
    ) -> Rows:
        hidden, valid = [], []
        for depth, linear in enumerate(self.aggregate):
            known = linear.in_features // HIDDEN
            rows = linear(taps[..., :known, :].flatten(-2))
            newest = torch.arange(taps.shape[1])
            here = (newest - depth).clamp(min=0)
            same = (documents == documents[:, here]) & (documents >= 0)
            hidden.append(rows[:, here])
            valid.append((newest >= depth) & same & (depth < fill))
        return Rows(torch.stack(hidden, 2), torch.stack(valid, 2))


def distillation(stage: Stage) -> Distillation:
    module = Module(PLAN)

    def row_loss(student: Tensor, teacher: Tensor, acceptance: float) -> RowLoss:
        target, draft = stage.logits(teacher), module.head(student)
        loss = nn.functional.kl_div(
            draft.log_softmax(-1), target.softmax(-1), reduction="batchmean"
        )
        return RowLoss(
            loss=loss * len(draft), agreed=int((draft.argmax(-1) == target.argmax(-1)).sum())
        )

    return Distillation(module, row_loss, num_stages=PLAN.num_stages)


def text() -> PackedText:
    generator = torch.Generator().manual_seed(2)
    sizes = torch.randint(1, 20, (30,), generator=generator).tolist()
    parts = [torch.randint(0, VOCAB, (size,), generator=generator).tolist() for size in sizes]
    return PackedText(parts, sequence_tokens=12, seed=5)


def options(folder: object, **changes: Any) -> TrainOptions:
    base = TrainOptions(
        data="a.txt",
        output=str(folder),
        num_steps=10,
        num_micro_batches=3,
        micro_batch_size=2,
        sequence_tokens=12,
        learning_rate=1e-2,
        num_warmup_steps=3,
        seed=7,
    )
    return replace(base, **changes)


def bytes_of(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, part in sorted(module.state_dict().items()):
        digest.update(name.encode() + part.contiguous().numpy().tobytes())
    return digest.hexdigest()


def cut_for(world: int) -> StagePlan:
    bounds = {1: (0, 6), 2: (0, 3, 6), 3: (0, 1, 4, 6)}[world]
    return StagePlan.from_bounds(bounds, taps=PLAN.taps)


def parts_of(rank: int, world: int) -> tuple[Stage, StreamedStage, Distillation | None]:
    cut = cut_for(world)
    start_pipeline(cut)
    stage = Stage(cut, rank)
    streamed = StreamedStage(stage, cut, rank, HIDDEN)
    return stage, streamed, distillation(stage) if rank == world - 1 else None


def train(rank: int, world: int, folder: str, stops: tuple[int, ...]) -> tuple[Any, ...]:
    stage, streamed, _ = parts_of(rank, world)
    before, reports, module = bytes_of(stage), [], None
    for stop in stops:
        fresh = distillation(stage) if rank == world - 1 else None
        reports += distill(streamed, fresh, text(), options(folder), plan=PLAN, stop_after=stop)
        module = None if fresh is None else bytes_of(fresh.module)
    assert bytes_of(stage) == before
    assert all(part.grad is None for part in stage.parameters())
    return module, reports


@pytest.mark.parametrize("world", [1, 2])
def test_ten_steps_are_five_and_a_resume_and_five(tmp_path: Path, world: int) -> None:
    whole = run_ranks(train, world, (world, str(tmp_path / "whole"), (10,)))[-1]
    halves = run_ranks(train, world, (world, str(tmp_path / "halves"), (5, 10)))[-1]
    assert whole == halves
    losses = [report.loss for report in whole[1]]
    assert len(losses) == 10 and sum(losses[5:]) < sum(losses[:5])
    steps = sorted(path.name for path in (tmp_path / "halves").iterdir())
    assert steps == ["step-00000005", "step-00000010"]


def gradients(rank: int, world: int) -> list[dict[str, Tensor]] | None:
    """Of the stand-ins, then of the real stages and module."""
    _, streamed, model = parts_of(rank, world)
    _, real, real_model = real_parts_of(rank, world)
    if model is None or real_model is None:
        assert gradients_of(streamed, None) is None and gradients_of(real, None) is None
        return None
    return [gradients_of(streamed, model) or {}, gradients_of(real, real_model) or {}]


def gradients_of(streamed: StreamedStage, model: Distillation | None) -> dict[str, Tensor] | None:
    batches = batches_of(text(), options(""), 0)
    drawn = DrawnStep.draw(batches, acceptance=0.6, num_stages=PLAN.num_stages, seed=7, step=0)

    def consume(arrived: Arrived) -> None:
        assert model is not None
        model(arrived, drawn.fills[arrived.index], 0.6, drawn.total_rows).backward()

    stream(streamed, batches, consume)
    if model is None:
        return None
    return {name: part.grad for name, part in model.named_parameters() if part.grad is not None}


def test_gradients_do_not_depend_on_the_number_of_ranks() -> None:
    one, *others = (run_ranks(gradients, world, (world,))[-1] for world in (1, 2, 3))
    assert len(one[0]) == 8 and len(one[1]) > 8
    for other in others:
        for ours, expected in zip(other, one, strict=True):
            assert ours.keys() == expected.keys()
            for name, part in expected.items():
                assert bool(part.abs().max() > 0), name
                torch.testing.assert_close(ours[name], part, rtol=1e-5, atol=1e-7)


def one_step(rank: int, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    """The module after an engine step, and after the same step by hand with torch's AdamW."""
    stage, streamed, model = parts_of(rank, 1)
    assert model is not None
    settings = options(folder, num_steps=1, gradient_clip=0.01)
    distill(streamed, model, text(), settings, plan=PLAN)
    byhand = distillation(stage)
    batches = batches_of(text(), settings, 0)
    drawn = DrawnStep.draw(batches, acceptance=0.5, num_stages=PLAN.num_stages, seed=7, step=0)
    optimizer = torch.optim.AdamW(byhand.parameters(), lr=1e-2 / 3, weight_decay=0.0)
    stream(
        streamed,
        batches,
        lambda here: byhand(here, drawn.fills[here.index], 0.5, drawn.total_rows).backward(),
    )
    nn.utils.clip_grad_norm_(byhand.parameters(), 0.01)
    optimizer.step()
    return [[part.detach() for part in net.parameters()] for net in (model, byhand)]


def test_the_engine_takes_the_step_of_the_token_weighted_mean(tmp_path: Path) -> None:
    [(ours, expected)] = run_ranks(one_step, 1, (str(tmp_path),))
    for left, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=2e-6)


def refusals(rank: int, folder: str) -> list[str]:
    _, streamed, model = parts_of(rank, 1)
    distill(streamed, model, text(), options(folder, num_steps=1), plan=PLAN)
    found = []
    other_plan = StagePlan.from_bounds((0, 1, 4, 6), taps=PLAN.taps)
    for kind, changes, plan in [
        (CheckpointError, {"seed": 8}, PLAN),
        (CheckpointError, {"micro_batch_size": 4}, PLAN),
        (CheckpointError, {}, other_plan),
        (ConfigError, {"joint": True}, PLAN),
        (ConfigError, {}, StagePlan.from_bounds((0, 3, 6))),
        (CheckpointError, {"weight_decay": 0.1, "num_steps": 9}, PLAN),
    ]:
        here = options(folder, **{"num_steps": 1, **changes})
        with pytest.raises(kind) as error:
            distill(streamed, model, text(), here, plan=plan)
        found.append(str(error.value))
    return found


def test_another_run_is_not_resumed(tmp_path: Path) -> None:
    [found] = run_ranks(refusals, 1, (str(tmp_path),))
    words = [
        "train.seed is 8 here but 7 in the checkpoint",
        "rows_consumed is 12 here but 6 in the checkpoint",
        "plan_fingerprint",
        "joint",
        "taps",
        "train.weight_decay is 0.1 here but 0.0 in the checkpoint",
    ]
    assert all(word in message for word, message in zip(words, found, strict=True)), found
    assert "train.num_steps is 9 here but 1" in found[5]


def diverge(rank: int, folder: str) -> str:
    """What a rank says when the module's weights are spoilt after two steps."""
    _, streamed, model = parts_of(rank, 2)

    def spoil(report: StepReport) -> None:
        if report.step == 2:
            with torch.no_grad():
                model.module.head.weight.fill_(torch.nan)

    settings = options(folder, save_every_steps=1)
    with pytest.raises(SpdError if rank else CommError) as error, comm.reporting_failures():
        distill(streamed, model, text(), settings, plan=PLAN, on_step=spoil)
    return str(error.value)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    first, last = run_ranks(diverge, 2, (str(tmp_path),))
    assert last.startswith("step 3: the loss is nan, so training stops")
    assert "step 3: the loss is nan" in first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    state = checkpointing.RunState(
        step=1, rows_consumed=6, acceptance=0.1, plan_fingerprint="a", cut_fingerprint="",
        data_fingerprint="b", target_hash="", options={"seed": 0},
    )  # fmt: skip
    with pytest.raises(AttributeError):
        checkpointing.save_checkpoint(tmp_path, state, {"a": torch.zeros(2)}, {"a": lambda: 0})
    assert list(tmp_path.iterdir()) == []
    checkpointing.save_checkpoint(tmp_path, state, {"a": torch.ones(2)}, {"b": 1})
    folder = tmp_path / "step-00000001"
    assert checkpointing.latest_checkpoint(tmp_path) == folder
    assert checkpointing.load_state(folder) == state
    (folder / "module.safetensors").write_bytes(b"\0" * 4)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpointing.load_tensors(folder)


def test_fills_follow_the_acceptance_and_only_their_seeds() -> None:
    rows = PackedRows(**{name: torch.zeros(40, 50, dtype=torch.int64) for name in
                         ("tokens", "positions", "documents")})  # fmt: skip
    assert torch.equal(draw_fill(rows, 0.5, 4, 1, 2), draw_fill(rows, 0.5, 4, 1, 2))
    assert not torch.equal(draw_fill(rows, 0.5, 4, 1, 2), draw_fill(rows, 0.5, 4, 1, 3))
    assert set(draw_fill(rows, 0.0, 4, 1).flatten().tolist()) == {1}
    assert set(draw_fill(rows, 1.0, 4, 1).flatten().tolist()) == {4}
    shares = torch.bincount(draw_fill(rows, 0.5, 4, 1).flatten(), minlength=5)[1:] / 2000
    assert torch.allclose(shares, torch.tensor([0.5, 0.25, 0.125, 0.125]), atol=0.04)


def test_rows_are_counted_within_their_document() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, -1, -1]])
    rows = PackedRows(tokens=documents, positions=documents, documents=documents)
    assert count_rows(rows, torch.full_like(documents, 1), 3) == 5
    assert count_rows(rows, torch.full_like(documents, 3), 3) == 3 + 2 + 1 + 2 + 1


SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": VOCAB,
    "norm_eps": 1e-5,
    "rope": RopeSpec(rope_type="default", theta=10000.0),
}


def real_parts_of(rank: int, world: int) -> tuple[TargetStage, StreamedStage, Distillation | None]:
    """One target's weights, however it is cut."""
    cut, uncut = cut_for(world), cut_for(1)
    start_pipeline(cut)
    torch.manual_seed(4)
    spec = TargetSpec(
        **SHAPE, num_layers=6, tied=False, max_positions=64, dtype="float32", bos_id=1, eos_ids=(2,)
    )
    weights = TargetStage(spec, uncut, 0, torch.float32).state_dict()
    stage = TargetStage(spec, cut, rank, torch.float32)
    first = cut.bounds[rank]
    own = {}
    for name in stage.state_dict():
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        whole = name.replace(f".{layer}.", f".{first + int(layer)}.", 1) if layer else name
        own[name] = weights[whole]
    stage.load_state_dict(own)
    streamed = StreamedStage(stage, cut, rank, 16)
    return stage, streamed, real_module(stage) if stage.is_last else None


def real_module(stage: TargetStage) -> Distillation:
    torch.manual_seed(5)
    config = ModuleConfig(
        **SHAPE, num_layers=1, aggregator="shared", head="linear",
        draft_vocab_size=VOCAB, bounds=PLAN.bounds, taps=PLAN.taps,
    )  # fmt: skip
    module = SpeculationModule(config, PLAN)
    module.init_from_target(stage.output.weight, stage.final_norm.weight)
    row_loss = row_loss_of(module, stage.logits, "blend")
    return Distillation(module, row_loss, num_stages=PLAN.num_stages)


def train_real(rank: int, world: int, folder: str, stops: tuple[int, ...]) -> tuple[Any, ...]:
    stage, streamed, _ = real_parts_of(rank, world)
    before, reports, last = bytes_of(stage), [], None
    for stop in stops:
        fresh = real_module(stage) if stage.is_last else None
        reports += distill(streamed, fresh, text(), options(folder), plan=PLAN, stop_after=stop)
        last = None if fresh is None else bytes_of(fresh.module)
    assert bytes_of(stage) == before
    return last, reports


def test_the_real_stages_and_module_train_and_resume(tmp_path: Path) -> None:
    whole = run_ranks(train_real, 2, (2, str(tmp_path / "whole"), (10,)))[-1]
    halves = run_ranks(train_real, 2, (2, str(tmp_path / "halves"), (5, 10)))[-1]
    assert whole == halves
    assert sum(report.loss for report in whole[1][5:]) < sum(report.loss for report in whole[1][:5])
