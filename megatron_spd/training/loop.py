"""The training loop: one call a rank, the same on every rank; the last stage holds the module."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_spd import comm
from megatron_spd.config import TrainOptions
from megatron_spd.errors import ConfigError
from megatron_spd.stage_plan import StagePlan
from megatron_spd.training import checkpointing
from megatron_spd.training.data import PackedRows, PackedText
from megatron_spd.training.distill import (
    START_ACCEPTANCE,
    Distillation,
    DrawnStep,
    StepSums,
    next_acceptance,
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


def learning_rate_at(options: TrainOptions, step: int) -> float:
    """Linear warm-up, then cosine decay to a tenth of the peak; `step` counts from 0."""
    warmup = options.num_warmup_steps
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(options.num_steps - warmup, 1)
    return options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * min(done, 1.0)))


def distill(
    stage: StreamedStage,
    distillation: Distillation | None,
    text: PackedText,
    options: TrainOptions,
    *,
    plan: StagePlan,
    stop_after: int | None = None,
    on_step: Callable[[StepReport], None] | None = None,
) -> list[StepReport]:
    """Trains the module up to `options.num_steps`, going on from the newest checkpoint in `output`.

    Every rank calls it with its stage. The last stage passes the module's `distillation` and gets
    the reports; the others pass None and get an empty list.

    Args:
        plan: the plan that the module is trained for; its taps are those of `stage.plan`.
        stop_after: ends early, with a checkpoint, after this many steps of the whole run.
        on_step: called on the last stage after each step.

    Raises:
        ConfigError: joint mode, or a plan whose taps the pipeline does not produce.
        CheckpointError: the checkpoint belongs to another run.
    """
    if options.joint:
        raise ConfigError("train.joint is not available yet; distillation keeps the target frozen")
    if plan.taps != stage.plan.taps:
        raise ConfigError(f"the module reads taps {plan.taps}, the stages give {stage.plan.taps}")
    is_last = stage.index == stage.plan.num_stages - 1
    if is_last != (distillation is not None):
        raise ConfigError("the last stage, and no other, holds the module")
    trainer = None if distillation is None else Trainer(distillation, text, options, plan)
    if trainer is not None:
        trainer.resume()
    # Only the last stage reads checkpoints, so that no file system need be shared.
    done = torch.tensor([0 if trainer is None else trainer.step])
    step = int(comm.sum_over_ranks(done))
    reports: list[StepReport] = []
    last = options.num_steps if stop_after is None else min(stop_after, options.num_steps)
    while step < last:
        batches = batches_of(text, options, step)
        if trainer is None:
            stream(stage, batches, _nothing)
        else:
            report = trainer.train_step(stage, batches)
            reports.append(report)
            if on_step is not None:
                on_step(report)
            if (step + 1) % options.save_every_steps == 0 or step + 1 == last:
                trainer.save()
        step += 1
    return reports


def batches_of(text: PackedText, options: TrainOptions, step: int) -> list[PackedRows]:
    """The micro-batches of a step, the same on every rank."""
    size, count = options.micro_batch_size, options.num_micro_batches
    return [text.rows((step * count + index) * size, size) for index in range(count)]


class Trainer:
    """The last stage's side: the DeepSpeed engine, the running acceptance and the checkpoints."""

    def __init__(
        self,
        distillation: Distillation,
        text: PackedText,
        options: TrainOptions,
        plan: StagePlan,
    ) -> None:
        self.distillation = distillation
        self.text = text
        self.options = options
        self.plan = plan
        self.step = 0
        self.acceptance = START_ACCEPTANCE
        self.engine = start_engine(distillation, options)

    def train_step(self, stage: StreamedStage, batches: list[PackedRows]) -> StepReport:
        """Streams the micro-batches of one step, trains on each as it arrives, and updates."""
        options = self.options
        rate = learning_rate_at(options, self.step)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        drawn = DrawnStep.draw(
            batches,
            acceptance=self.acceptance,
            num_stages=self.plan.num_stages,
            seed=options.seed,
            step=self.step,
        )
        self.distillation.sums = StepSums()

        def consume(arrived: Arrived) -> None:
            share: Tensor = self.engine(
                arrived, drawn.fills[arrived.index], self.acceptance, drawn.total_rows
            )
            # The engine divides by the number of micro-batches; the shares already add up.
            (share * len(batches)).backward()
            self.engine.step()

        stream(stage, batches, consume)
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

    def save(self) -> Path:
        """Writes the checkpoint of the current step."""
        state = checkpointing.RunState(
            step=self.step,
            rows_consumed=self.step * _rows_per_step(self.options),
            acceptance=self.acceptance,
            seed=self.options.seed,
            plan_fingerprint=self.plan.fingerprint,
            data_fingerprint=self.text.fingerprint,
        )
        return checkpointing.save_checkpoint(
            Path(self.options.output),
            state,
            self.distillation.module.state_dict(),
            self.engine.optimizer.optimizer.state_dict(),
        )

    def resume(self) -> None:
        """Goes on from the newest checkpoint, if there is one.

        Raises:
            CheckpointError: it is damaged or belongs to another run.
        """
        folder = checkpointing.latest_checkpoint(Path(self.options.output))
        if folder is None:
            return
        state = checkpointing.load_state(folder)
        checkpointing.check_same_run(
            folder,
            state,
            seed=self.options.seed,
            rows_consumed=state.step * _rows_per_step(self.options),
            plan_fingerprint=self.plan.fingerprint,
            data_fingerprint=self.text.fingerprint,
        )
        tensors, optimizer = checkpointing.load_tensors(folder)
        self.distillation.module.load_state_dict(tensors)
        zero = self.engine.optimizer
        zero.refresh_fp32_params()
        zero.optimizer.load_state_dict(optimizer)
        self.step, self.acceptance = state.step, state.acceptance


class _LastStage:
    """What DeepSpeed asks of a Megatron mpu: one data-parallel rank, no tensor parallelism."""

    def get_data_parallel_group(self) -> Any:
        return parallel_state.get_data_parallel_group()

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_group(self) -> Any:
        return parallel_state.get_tensor_model_parallel_group()

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1


def start_engine(distillation: Distillation, options: TrainOptions) -> Any:
    """A DeepSpeed engine over the module's parameters, on this rank alone."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # reads DS_ACCELERATOR when it is imported

    config = {
        "train_micro_batch_size_per_gpu": options.micro_batch_size,
        "gradient_accumulation_steps": options.num_micro_batches,
        "zero_optimization": {"stage": options.zero_stage},
        "gradient_clipping": options.gradient_clip,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": options.learning_rate,
                "weight_decay": options.weight_decay,
                "torch_adam": True,
            },
        },
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=distillation,
        model_parameters=[part for part in distillation.parameters() if part.requires_grad],
        mpu=_LastStage(),
        dist_init_required=False,
        config=config,
    )
    return engine


def _rows_per_step(options: TrainOptions) -> int:
    return options.num_micro_batches * options.micro_batch_size


def _nothing(_: Arrived) -> None:
    raise AssertionError("only the last stage consumes")
