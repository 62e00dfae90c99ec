"""Joint training: the target and the speculation module learn together, over all ranks.

    loss of a step = mean over its target tokens of the target's cross entropy
                   + module_loss_weight * mean over its rows of the module's distillation loss

Megatron-core's 1F1B schedule carries hidden states and taps forward and their gradients back. Each
rank has a DeepSpeed engine over its own stage (the last also over the module); they share one
gradient norm. The teacher of the module is the target as it is, without a gradient; the taps carry
one only with `gradient_through_taps`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from megatron_spd import comm
from megatron_spd.config import TrainOptions
from megatron_spd.errors import ConfigError
from megatron_spd.stage_plan import StagePlan
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
from megatron_spd.training.language_loss import count_targets, language_loss
from megatron_spd.training.loop import (
    Run,
    StepReport,
    batches_of,
    check_roles,
    learning_rate_at,
)
from megatron_spd.training.pipeline import Arrived, StreamedStage, TextStage, stream_back
from megatron_spd.training.shared_checkpoint import Part, load_together, save_together
from megatron_spd.training.tied import TiedEnds


def train_jointly(
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
    """Trains target and module up to `options.num_steps`, going on from the newest checkpoint.

    Every rank calls it with its trainable stage, in float32. The last stage passes the module's
    `distillation` and gets the reports; the others pass None and get an empty list. All ranks
    return after the same step, with their weights in `stage` and `distillation`.

    Args:
        plan: the plan that the module is trained for; its taps are those of `stage.plan`.
        stop_after: ends early, with a checkpoint, after this many steps of the whole run.
        on_step: called on the last stage after each step.
        target_hash: of the weights that the run starts from; another run's checkpoint is refused.

    Raises:
        ConfigError: a frozen or half-precision stage, or a plan whose taps the pipeline does not
            produce.
        CheckpointError: on every rank, the checkpoint is damaged or belongs to another run.
        SpdError: on every rank, the loss or the gradient is not finite; the last checkpoint stays.
    """
    check_roles(stage, distillation, options, plan, joint=True)
    if stage.dtype != torch.float32:
        raise ConfigError(
            f"joint training updates the target in float32, the stage has {stage.dtype}; "
            "load its weights as float32"
        )
    run = Run(text=text, options=options, plan=plan, cut=stage.plan, target_hash=target_hash)
    learner = JointLearner(stage, distillation, run)
    learner.resume()
    reports: list[StepReport] = []
    end = run.end(stop_after)
    while learner.step < end:
        report = learner.train_step(batches_of(text, options, learner.step))
        if report is not None:
            reports.append(report)
            if on_step is not None:
                on_step(report)
        if run.saves_at(learner.step, end):
            learner.save()
    return reports


@dataclass(kw_only=True)
class JointLoss:
    """The loss of one step on the last stage, micro-batch by micro-batch."""

    logits: Callable[[Tensor], Tensor]
    """The target's, of un-normed rows."""
    distillation: Distillation
    options: TrainOptions
    drawn: DrawnStep
    acceptance: float
    num_targets: int
    """Tokens with a target in all micro-batches of the step."""
    target_sum: float = 0.0
    """Sum of the target's loss so far."""

    def __call__(self, arrived: Arrived) -> Tensor:
        """The micro-batch's share of the step's loss."""
        options, drawn = self.options, self.drawn
        own = language_loss(arrived.hidden, arrived.rows, self.logits)
        self.target_sum += float(own.detach())
        read = replace(
            arrived,
            hidden=arrived.hidden.detach(),
            taps=arrived.taps if options.gradient_through_taps else arrived.taps.detach(),
        )
        fill = drawn.fills[arrived.index]
        module: Tensor = self.distillation(read, fill, self.acceptance, drawn.total_rows)
        return own / max(self.num_targets, 1) + options.module_loss_weight * module

    @property
    def mean_target_loss(self) -> float:
        return self.target_sum / max(self.num_targets, 1)


def loss_of_step(
    stage: StreamedStage,
    distillation: Distillation,
    run: Run,
    batches: Sequence[PackedRows],
    *,
    step: int,
    acceptance: float,
) -> JointLoss:
    """The loss of a step, before its first micro-batch; clears the module's sums."""
    distillation.sums = StepSums()
    return JointLoss(
        logits=cast(TextStage, stage.stage).logits,
        distillation=distillation,
        options=run.options,
        drawn=run.drawn(batches, step, acceptance),
        acceptance=acceptance,
        num_targets=sum(count_targets(rows) for rows in batches),
    )


class JointLearner:
    """One rank's side: its parameters, its engine and its part of the checkpoints."""

    def __init__(self, stage: StreamedStage, distillation: Distillation | None, run: Run) -> None:
        self.stage = stage
        self.distillation = distillation
        self.run = run
        self.step = 0
        self.acceptance = START_ACCEPTANCE
        self.tied = TiedEnds(stage)
        self.tied.spread_weight()
        learns = nn.ModuleList([stage, *([distillation] if distillation else [])])
        self.engine = start_engine(
            learns,
            [
                part
                for part in learns.parameters()
                if part.requires_grad and part is not self.tied.copy
            ],
            run.options,
            ModelRanks.pipeline(),
            backwards=1,
        )

    def accumulate(self, batches: Sequence[PackedRows]) -> JointLoss | None:
        """Adds the gradient of one step's loss to the parameters; the loss on the last stage."""
        loss = None
        if self.distillation is not None:
            loss = loss_of_step(
                self.stage,
                self.distillation,
                self.run,
                batches,
                step=self.step,
                acceptance=self.acceptance,
            )
        stream_back(self.stage, batches, loss if loss is not None else _nothing)
        self.tied.join_gradients()
        return loss

    def train_step(self, batches: Sequence[PackedRows]) -> StepReport | None:
        """One update on every rank, and its report on the last stage.

        Raises:
            SpdError: on every rank, a loss or the gradient is not finite.
        """
        rate = learning_rate_at(self.run.options, self.step)
        set_learning_rate(self.engine, rate)
        # The schedule runs all backward passes; DeepSpeed takes their sum when the block ends.
        with self.engine.coalesce_grad_reduction():
            loss = self.accumulate(batches)
        self._check_losses(loss)
        self.engine.step()
        check_updated(self.engine, self.step + 1)
        self.tied.spread_weight()
        self.step += 1
        if loss is None:
            return None
        sums = loss.distillation.sums
        self.acceptance = next_acceptance(self.acceptance, sums)
        return StepReport(
            step=self.step,
            loss=sums.mean_loss,
            agreement=sums.agreement,
            acceptance=self.acceptance,
            learning_rate=rate,
            num_rows=sums.rows,
            target_loss=loss.mean_target_loss,
        )

    def _check_losses(self, loss: JointLoss | None) -> None:
        """All ranks learn the losses, so that all of them stop before they update."""
        device = next(self.stage.parameters()).device
        values = torch.zeros(2, dtype=torch.float64, device=device)
        if loss is not None:
            values[0], values[1] = loss.mean_target_loss, loss.distillation.sums.mean_loss
        found = comm.sum_over_ranks(values).tolist()
        for name, value in zip(("target's loss", "module's loss"), found, strict=True):
            check_finite(self.step + 1, name, value)

    def save(self) -> None:
        """Writes the checkpoint of the current step, this rank's part of it."""
        tensors = {f"stage-{self.stage.index}": self.stage.stage.state_dict()}
        leading = None
        if self.distillation is not None:
            tensors["module"] = self.distillation.module.state_dict()
            leading = self.run.state(self.step, self.acceptance)
        part = Part(stage=self.stage.index, tensors=tensors, optimizer=optimizer_state(self.engine))
        save_together(Path(self.run.options.output), leading, part)

    def resume(self) -> None:
        """Goes on from the newest checkpoint, if there is one.

        Raises:
            CheckpointError: on every rank, it is damaged or belongs to another run.
        """
        distillation = self.distillation
        own = f"stage-{self.stage.index}"
        found = load_together(
            Path(self.run.options.output),
            distillation is not None,
            self.stage.index,
            (own,) if distillation is None else (own, "module"),
            lambda step: self.run.state(step, 0.0),
        )
        if found is None:
            return
        state, part = found
        self.stage.stage.load_state_dict(part.tensors[own])
        if distillation is not None:
            distillation.module.load_state_dict(part.tensors["module"])
        restore_optimizer(self.engine, part.optimizer)
        self.step, self.acceptance = state.step, state.acceptance


def _nothing(_: Arrived) -> Tensor:
    raise AssertionError("only the last stage has a loss")
