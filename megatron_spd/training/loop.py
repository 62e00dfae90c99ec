"""The loop of distillation: one call a rank; the last stage holds the module, the only learner."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_spd import comm
from megatron_spd.config import TrainOptions
from megatron_spd.errors import ConfigError
from megatron_spd.stage_plan import StagePlan
from megatron_spd.training import checkpointing
from megatron_spd.training.checkpointing import RunState
from megatron_spd.training.data import PackedRows, PackedText
from megatron_spd.training.distill import (
    START_ACCEPTANCE,
    Distillation,
    DrawnStep,
    StepSums,
    next_acceptance,
)
from megatron_spd.training.engine import (
    ModelRanks,
    check_finite,
    check_updated,
    optimizer_state,
    restore_optimizer,
    set_learning_rate,
    start_engine,
)
from megatron_spd.training.pipeline import Arrived, StreamedStage, stream


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step as the last stage saw it."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean loss a row."""
    agreement: float
    """Share of depth-0 rows that name the target's own most probable token."""
    acceptance: float
    """Running acceptance after the step."""
    learning_rate: float
    num_rows: int
    target_loss: float | None = None
    """The target's own mean loss a token, in joint mode."""


def learning_rate_at(options: TrainOptions, step: int) -> float:
    """Linear warm-up, then cosine decay to a tenth of the peak; `step` counts from 0."""
    warmup = options.num_warmup_steps
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(options.num_steps - warmup, 1)
    return options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * min(done, 1.0)))


def batches_of(text: PackedText, options: TrainOptions, step: int) -> list[PackedRows]:
    """The micro-batches of a step, the same on every rank."""
    size, count = options.micro_batch_size, options.num_micro_batches
    return [text.rows((step * count + index) * size, size) for index in range(count)]


def check_roles(
    stage: StreamedStage,
    distillation: Distillation | None,
    options: TrainOptions,
    plan: StagePlan,
    *,
    joint: bool,
) -> None:
    """Refuses what cannot train: the one place that knows which stages and options go together.

    Raises:
        ConfigError: the stage, the options and the caller do not agree on whether the target
            learns; the plan reads taps that the stages do not give; the module is on a wrong rank.
    """
    if not stage.trainable == options.joint == joint:
        raise ConfigError(
            f"train.joint is {options.joint}, the stage is "
            f"{'trainable' if stage.trainable else 'frozen'}: joint training is train_jointly over "
            "trainable stages, distillation is distill over frozen ones"
        )
    if plan.taps != stage.plan.taps:
        raise ConfigError(f"the module reads taps {plan.taps}, the stages give {stage.plan.taps}")
    if stage.is_last != (distillation is not None):
        raise ConfigError("the last stage, and no other, holds the module")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run is, apart from how far it is."""

    text: PackedText
    options: TrainOptions
    plan: StagePlan
    cut: StagePlan | None = None
    """How the trained target is cut; None while it is frozen."""
    target_hash: str = ""

    def state(self, step: int, acceptance: float) -> RunState:
        """Its state after `step` steps."""
        options = self.options
        return RunState(
            step=step,
            rows_consumed=step * options.num_micro_batches * options.micro_batch_size,
            acceptance=acceptance,
            plan_fingerprint=self.plan.fingerprint,
            cut_fingerprint=self.cut.fingerprint if self.cut else "",
            data_fingerprint=self.text.fingerprint,
            target_hash=self.target_hash,
            options=checkpointing.options_of(options),
        )

    def drawn(self, batches: Sequence[PackedRows], step: int, acceptance: float) -> DrawnStep:
        """What is random in the step."""
        return DrawnStep.draw(
            batches,
            acceptance=acceptance,
            num_stages=self.plan.num_stages,
            seed=self.options.seed,
            step=step,
        )

    def end(self, stop_after: int | None) -> int:
        """The step to stop after."""
        steps = self.options.num_steps
        return steps if stop_after is None else min(stop_after, steps)

    def saves_at(self, step: int, end: int) -> bool:
        """Whether a checkpoint is due after so many steps."""
        return step % self.options.save_every_steps == 0 or step == end


def distill(
    stage: StreamedStage,
    distillation: Distillation | None,
    text: PackedText,
    options: TrainOptions,
    *,
    plan: StagePlan,
    stop_after: int | None = None,
    on_step: Callable[[StepReport], None] | None = None,
    target_hash: str = "",
) -> list[StepReport]:
    """Trains the module up to `options.num_steps`, going on from the newest checkpoint in `output`.

    Every rank calls it with its frozen stage. The last stage passes the module's `distillation`
    and gets the reports; the others pass None and get an empty list.

    Args:
        plan: the plan that the module is trained for; its taps are those of `stage.plan`.
        stop_after: ends early, with a checkpoint, after this many steps of the whole run.
        on_step: called on the last stage after each step.
        target_hash: of the target's weights; a checkpoint of other weights is refused.

    Raises:
        ConfigError: joint mode, or a plan whose taps the pipeline does not produce.
        CheckpointError: the checkpoint belongs to another run.
        SpdError: on the last stage, the loss or the gradient is not finite; the other ranks fail
            as soon as they miss it.
    """
    check_roles(stage, distillation, options, plan, joint=False)
    run = Run(text=text, options=options, plan=plan, target_hash=target_hash)
    trainer = None if distillation is None else Trainer(distillation, run)
    if trainer is not None:
        trainer.resume()
    # Only the last stage reads checkpoints, so that no file system need be shared.
    done = torch.tensor([0 if trainer is None else trainer.step])
    step = int(comm.sum_over_ranks(done))
    reports: list[StepReport] = []
    end = run.end(stop_after)
    while step < end:
        batches = batches_of(text, options, step)
        if trainer is None:
            stream(stage, batches, _nothing)
        else:
            report = trainer.train_step(stage, batches)
            reports.append(report)
            if on_step is not None:
                on_step(report)
            if run.saves_at(step + 1, end):
                trainer.save()
        step += 1
    return reports


class Trainer:
    """The last stage's side: the DeepSpeed engine, the running acceptance and the checkpoints."""

    def __init__(self, distillation: Distillation, run: Run) -> None:
        self.distillation = distillation
        self.run = run
        self.step = 0
        self.acceptance = START_ACCEPTANCE
        self.engine = start_engine(
            distillation,
            [part for part in distillation.parameters() if part.requires_grad],
            run.options,
            ModelRanks.alone(),
            backwards=run.options.num_micro_batches,
        )

    def train_step(self, stage: StreamedStage, batches: list[PackedRows]) -> StepReport:
        """Streams the micro-batches of one step, trains on each as it arrives, and updates.

        Raises:
            SpdError: the loss or the gradient is not finite.
        """
        rate = learning_rate_at(self.run.options, self.step)
        set_learning_rate(self.engine, rate)
        drawn = self.run.drawn(batches, self.step, self.acceptance)
        self.distillation.sums = StepSums()

        def consume(arrived: Arrived) -> None:
            share: Tensor = self.engine(
                arrived, drawn.fills[arrived.index], self.acceptance, drawn.total_rows
            )
            check_finite(self.step + 1, "loss", float(share.detach()))
            # The engine divides by the number of micro-batches; the shares already add up.
            (share * len(batches)).backward()
            self.engine.step()

        stream(stage, batches, consume)
        check_updated(self.engine, self.step + 1)
        sums = self.distillation.sums
        self.acceptance = next_acceptance(self.acceptance, sums)
        self.step += 1
        return StepReport(
            step=self.step,
            loss=sums.mean_loss,
            agreement=sums.agreement,
            acceptance=self.acceptance,
            learning_rate=rate,
            num_rows=sums.rows,
        )

    def save(self) -> None:
        """Writes the checkpoint of the current step."""
        checkpointing.save_checkpoint(
            Path(self.run.options.output),
            self.run.state(self.step, self.acceptance),
            self.distillation.module.state_dict(),
            optimizer_state(self.engine),
        )

    def resume(self) -> None:
        """Goes on from the newest checkpoint, if there is one.

        Raises:
            CheckpointError: it is damaged or belongs to another run.
        """
        folder = checkpointing.latest_checkpoint(Path(self.run.options.output))
        if folder is None:
            return
        state = checkpointing.load_state(folder)
        checkpointing.check_same_run(folder, state, self.run.state(state.step, state.acceptance))
        tensors, optimizer = checkpointing.load_tensors(folder)
        self.distillation.module.load_state_dict(tensors)
        restore_optimizer(self.engine, optimizer)
        self.step, self.acceptance = state.step, state.acceptance


def _nothing(_: Arrived) -> None:
    raise AssertionError("only the last stage consumes")
