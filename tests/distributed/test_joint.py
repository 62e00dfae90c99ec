"""Joint training over gloo ranks: gradients and updates of one process, exact resume, clear stops.

The oracle is one uncut target under plain autograd, with the losses written out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_spd import comm
from megatron_spd.config import TrainOptions
from megatron_spd.errors import CheckpointError, ConfigError, SpdError
from megatron_spd.model.stage import TargetStage
from megatron_spd.speculation.config import ModuleConfig
from megatron_spd.speculation.module import SpeculationModule
from megatron_spd.stage_plan import StagePlan
from megatron_spd.target_spec import RopeSpec, TargetSpec
from megatron_spd.testing import run_ranks
from megatron_spd.training import checkpointing
from megatron_spd.training.data import PackedRows, PackedText
from megatron_spd.training.distill import Distillation, row_loss_of
from megatron_spd.training.joint import loss_of_step, train_jointly
from megatron_spd.training.language_loss import count_targets
from megatron_spd.training.loop import Run, StepReport, batches_of, distill
from megatron_spd.training.pipeline import Arrived, StreamedStage, start_pipeline, stream_back
from megatron_spd.training.tied import TiedEnds

HIDDEN, VOCAB = 16, 24
PLAN = StagePlan.from_bounds((0, 2, 4, 6))
CUTS = {1: (0, 6), 2: (0, 3, 6), 3: (0, 1, 4, 6)}
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": VOCAB,
    "norm_eps": 1e-5,
    "rope": RopeSpec(rope_type="default", theta=10000.0),
}
Named = dict[str, Tensor]
VARIANTS = [(tied, through) for tied in (False, True) for through in (False, True)]


def spec_of(tied: bool) -> TargetSpec:
    return TargetSpec(
        **SHAPE, num_layers=6, tied=tied, max_positions=64, dtype="float32", bos_id=1, eos_ids=(2,)
    )


def cut_for(world: int) -> StagePlan:
    return StagePlan.from_bounds(CUTS[world], taps=PLAN.taps)


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
        module_loss_weight=0.7,
        joint=True,
        seed=7,
    )
    return replace(base, **changes)


def global_name(cut: StagePlan, stage: int, name: str) -> str:
    """The name that the uncut target has for a stage's tensor."""
    head, _, rest = name.partition(".")
    if head != "layers":
        return name
    local, _, rest = rest.partition(".")
    return f"layers.{cut.bounds[stage] + int(local)}.{rest}"


def whole_target(tied: bool, sharp: float = 1.0) -> TargetStage:
    """Its distribution is far from even when `sharp` is large."""
    torch.manual_seed(4)
    uncut = StagePlan.from_bounds((0, 6), taps=PLAN.taps)
    target = TargetStage(spec_of(tied), uncut, 0, torch.float32, trainable=True)
    with torch.no_grad():
        target.output.weight.mul_(sharp)
    return target


def parts_of(
    rank: int, world: int, tied: bool = False, sharp: float = 1.0
) -> tuple[StreamedStage, Distillation]:
    """This rank's stage with the weights of `whole_target`; a module over its output on the last.

    On the other ranks the module is a dummy that nobody uses.
    """
    cut = cut_for(world)
    start_pipeline(cut)
    whole = whole_target(tied, sharp)
    stage = TargetStage(spec_of(tied), cut, rank, torch.float32, trainable=True)
    weights = whole.state_dict()
    stage.load_state_dict({name: weights[global_name(cut, rank, name)] for name in
                           stage.state_dict()})  # fmt: skip
    streamed = StreamedStage(stage, cut, rank, HIDDEN, trainable=True)
    return streamed, module_over(stage if streamed.is_last else whole)


def module_over(target: TargetStage) -> Distillation:
    torch.manual_seed(5)
    config = ModuleConfig(
        **SHAPE, num_layers=1, aggregator="shared", head="linear",
        draft_vocab_size=VOCAB, bounds=PLAN.bounds, taps=PLAN.taps,
    )  # fmt: skip
    module = SpeculationModule(config, PLAN)
    module.init_from_target(target.output.weight, target.final_norm.weight)
    row_loss = row_loss_of(module, target.logits, "blend")
    return Distillation(module, row_loss, num_stages=PLAN.num_stages, depth_weights=(1, 0.5, 0.5))


def oracle_loss(
    target: TargetStage,
    distillation: Distillation,
    settings: TrainOptions,
    *,
    step: int,
    acceptance: float,
) -> Tensor:
    """The step's whole loss on one uncut target."""
    run = Run(text=text(), options=settings, plan=PLAN)
    batches = batches_of(run.text, settings, step)
    drawn = run.drawn(batches, step, acceptance)
    own, module = torch.zeros(()), torch.zeros(())
    tokens = 0
    for index, rows in enumerate(batches):
        embedded = target.embed(rows.tokens)
        out = target.forward_text(embedded, rows.positions, rows.documents)
        taps = torch.stack([embedded, *out.taps], 2)
        scores = target.logits(out.hidden).log_softmax(-1)
        for row, documents in enumerate(rows.documents.tolist()):
            for at in range(len(documents) - 1):
                if documents[at] == documents[at + 1] != -1:
                    own = own - scores[row, at, rows.tokens[row, at + 1]]
                    tokens += 1
        read = Arrived(
            index=index,
            rows=rows,
            hidden=out.hidden.detach(),
            taps=taps if settings.gradient_through_taps else taps.detach(),
        )
        module = module + distillation(read, drawn.fills[index], acceptance, drawn.total_rows)
    return own / tokens + settings.module_loss_weight * module


def named_gradients(parts: Iterator[tuple[str, nn.Parameter]]) -> Named:
    return {name: part.grad for name, part in parts if part.grad is not None}


def own_gradients(rank: int, world: int, tied: bool, settings: TrainOptions) -> Named:
    """The gradients of this rank, under the uncut target's names."""
    streamed, distillation = parts_of(rank, world, tied)
    run = Run(text=text(), options=settings, plan=PLAN)
    batches = batches_of(run.text, settings, 1)
    loss: Any = None
    if streamed.is_last:
        loss = loss_of_step(streamed, distillation, run, batches, step=1, acceptance=0.6)
    stream_back(streamed, batches, loss)
    TiedEnds(streamed).join_gradients()
    found = {
        global_name(streamed.plan, rank, name): part
        for name, part in named_gradients(streamed.stage.named_parameters()).items()
    }
    if streamed.is_last:
        found |= named_gradients(distillation.named_parameters())
    return found


def oracle_gradients() -> list[Named]:
    """For each variant with and without the module's loss, of one uncut target."""
    found = []
    for tied, through in VARIANTS:
        for weight in (0.7, 0.0):
            target = whole_target(tied)
            distillation = module_over(target)
            settings = options("", gradient_through_taps=through, module_loss_weight=weight)
            oracle_loss(target, distillation, settings, step=1, acceptance=0.6).backward()
            found.append(
                named_gradients(target.named_parameters())
                | named_gradients(distillation.named_parameters())
            )
    return found


def all_gradients(rank: int, world: int) -> tuple[list[Named], list[Named]]:
    ours = [
        own_gradients(rank, world, tied, options("", gradient_through_taps=through))
        for tied, through in VARIANTS
    ]
    return ours, oracle_gradients()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_are_those_of_one_process(world: int) -> None:
    ranks = run_ranks(all_gradients, world, (world,))
    oracle = ranks[0][1]
    for variant, (tied, through) in enumerate(VARIANTS):
        found: Named = {}
        for parts, _ in ranks:
            assert not found.keys() & parts[variant].keys()
            found |= parts[variant]
        both, language = oracle[2 * variant], oracle[2 * variant + 1]
        assert found.keys() == both.keys() and ("output.weight" in found) != tied
        for name, part in both.items():
            assert float(part.abs().max()) > 0, name
            torch.testing.assert_close(found[name], part, rtol=1e-5, atol=1e-6)
        for name in (name for name in found if not name.startswith("module.")):
            alone = bool(torch.allclose(found[name], language[name], rtol=1e-5, atol=1e-6))
            # The output and the final norm come after the last tap.
            assert alone != (through and name not in ("final_norm.weight", "output.weight")), name


def after_one_step(rank: int, folder: str) -> list[tuple[Named, Named, float]]:
    """Untied and tied: weights after an engine step on two ranks, and by hand with the norm."""
    found = []
    for tied in (False, True):
        settings = options(
            f"{folder}/{tied}",
            zero_stage=2 if tied else 1,
            num_steps=1,
            gradient_clip=0.05,
            weight_decay=0.1,
            gradient_through_taps=True,
        )
        streamed, distillation = parts_of(rank, 2, tied)
        last = distillation if streamed.is_last else None
        train_jointly(streamed, last, text(), settings, plan=PLAN)
        target = whole_target(tied)
        byhand = module_over(target)
        learning = [*target.parameters(), *byhand.parameters()]
        optimizer = torch.optim.AdamW(learning, lr=1e-2 / 3, weight_decay=0.1)
        oracle_loss(target, byhand, settings, step=0, acceptance=0.5).backward()
        norm = nn.utils.clip_grad_norm_(learning, 0.05)
        optimizer.step()
        ours = {global_name(streamed.plan, rank, name): part
                for name, part in streamed.stage.state_dict().items()}  # fmt: skip
        ours |= {} if last is None else last.state_dict()
        found.append((ours, target.state_dict() | byhand.state_dict(), float(norm)))
    return found


def test_the_engines_take_one_clipped_step(tmp_path: Path) -> None:
    ranks = run_ranks(after_one_step, 2, (str(tmp_path),))
    for ours, expected, norm in (*ranks[0], *ranks[1]):
        assert norm > 0.5
        for name, part in ours.items():
            torch.testing.assert_close(part, expected[name], rtol=0, atol=2e-6)
    assert torch.equal(ranks[0][1][0]["embedding.weight"], ranks[1][1][0]["output.weight"])


def digest(module: nn.Module) -> str:
    found = hashlib.sha256()
    for name, part in sorted(module.state_dict().items()):
        found.update(name.encode() + part.contiguous().numpy().tobytes())
    return found.hexdigest()


Trained = tuple[str, str | None, list[StepReport]]


def train(rank: int, folder: str, stops: tuple[int, ...], tied: bool) -> Trained:
    """The bytes of this rank's stage and module, and its reports."""
    reports, module = [], None
    for stop in stops:
        streamed, distillation = parts_of(rank, 2, tied, sharp=8.0)
        last = distillation if streamed.is_last else None
        settings = options(folder, zero_stage=2 if tied else 1)
        reports += train_jointly(streamed, last, text(), settings, plan=PLAN, stop_after=stop)
        module = None if last is None else digest(last.module)
    return digest(streamed.stage), module, reports


def train_both(rank: int, folder: str, stops: tuple[int, ...]) -> list[Trained]:
    return [train(rank, f"{folder}/{tied}", stops, tied) for tied in (False, True)]


def test_ten_steps_are_five_and_a_resume_and_five(tmp_path: Path) -> None:
    whole = run_ranks(train_both, 2, (str(tmp_path / "whole"), (10,)))
    halves = run_ranks(train_both, 2, (str(tmp_path / "halves"), (5, 10)))
    assert whole == halves
    for first, last in zip(*whole, strict=True):
        assert first[1:] == (None, []) and last[1] is not None
        reports = last[2]
        assert [report.step for report in reports] == list(range(1, 11))
        for early, late in zip(reports[:3], reports[-3:], strict=True):
            assert late.target_loss < early.target_loss and late.loss < early.loss
    steps = sorted(path.name for path in (tmp_path / "halves" / "True").iterdir())
    assert steps == ["step-00000005", "step-00000010"]


def diverge(rank: int, folder: str) -> str:
    """What every rank says when the module's weights are spoilt after two steps."""
    streamed, distillation = parts_of(rank, 2)
    last = distillation if streamed.is_last else None

    def spoil(report: StepReport) -> None:
        if report.step == 2:
            with torch.no_grad():
                distillation.module.head.linear.weight.fill_(torch.nan)

    settings = options(folder, save_every_steps=1)
    with pytest.raises(SpdError) as error:
        train_jointly(streamed, last, text(), settings, plan=PLAN, on_step=spoil)
    return str(error.value)


def interrupt(rank: int, folder: str) -> None:
    """Control-C, which reaches all ranks, while they write a checkpoint."""
    streamed, distillation = parts_of(rank, 2)
    last = distillation if streamed.is_last else None

    def stop(*_: object) -> None:
        store = comm.current_world().store
        if rank == 0:
            store.set("interrupted", "")
        else:
            # the leader removes the folder, so the other must be done with it
            store.wait(["interrupted"])
            assert len(list(Path(folder).iterdir())) == 1
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpointing, "write_optimizer", stop)
        train_jointly(streamed, last, text(), options(folder, num_steps=1), plan=PLAN)


def refuse(rank: int, folder: str) -> list[str]:
    """What every rank says to a resume with other options, weights, stages or a damaged part."""
    streamed, distillation = parts_of(rank, 2)
    last = distillation if streamed.is_last else None
    settings = options(folder, num_steps=1)
    train_jointly(streamed, last, text(), settings, plan=PLAN, target_hash="aa")
    found = []
    cases: list[tuple[type[SpdError], dict[str, Any], Any, str]] = [
        (CheckpointError, {"learning_rate": 0.5, "loss": "kl"}, train_jointly, "aa"),
        (CheckpointError, {}, train_jointly, "bb"),
        (ConfigError, {"joint": False}, train_jointly, "aa"),
        (ConfigError, {}, distill, "aa"),
        (CheckpointError, {}, train_jointly, "aa"),
    ]
    for kind, changes, function, weights in cases:
        if len(found) == 4 and rank == 0:
            (Path(folder) / "step-00000001" / "optimizer-0.pt").write_bytes(b"\0")
        here = replace(settings, **changes)
        with pytest.raises(kind) as error:
            function(streamed, last, text(), here, plan=PLAN, target_hash=weights)
        found.append(str(error.value))
    return found


def stops(rank: int, folder: str) -> list[str]:
    interrupt(rank, f"{folder}/interrupted")
    return [diverge(rank, f"{folder}/diverged"), *refuse(rank, f"{folder}/refused")]


def test_every_rank_stops_and_says_why(tmp_path: Path) -> None:
    first, second = run_ranks(stops, 2, (str(tmp_path),))
    assert first == second
    diverged, other, weights, frozen, distilling, damaged = first
    assert diverged.startswith("step 3: the module's loss is nan")
    kept = sorted(path.name for path in (tmp_path / "diverged").iterdir())
    assert kept == ["step-00000001", "step-00000002"]
    assert list((tmp_path / "interrupted").iterdir()) == []
    assert "train.learning_rate is 0.5 here but 0.01 in the checkpoint" in other
    assert "train.loss is 'kl' here but 'blend' in the checkpoint" in other
    assert "target_hash is 'bb' here but 'aa' in the checkpoint" in weights
    assert "train.joint is False, the stage is trainable" in frozen
    assert "train.joint is True, the stage is trainable" in distilling
    assert "rank 0" in damaged and "optimizer-0.pt cannot be read" in damaged


def test_target_tokens_are_counted_within_documents() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0, 1, 2, 2, -1, -1, -1]])
    rows = PackedRows(tokens=documents, positions=documents, documents=documents)
    assert count_targets(rows) == 2 + 1 + 0 + 0 + 1
