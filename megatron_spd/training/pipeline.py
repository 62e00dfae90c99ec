"""Megatron-core's own schedule, with the taps riding in its normal messages.

A message between stages is [S, B, (1 + k) * H]: the hidden state, then boundary 0, then every tap
that the stages so far produced, ascending. The last stage therefore holds all taps of a micro-batch
when it has its logits, without one extra message.

    stage 0: hidden | tap 0 | taps of stage 0
    stage 1: hidden | tap 0 | taps of stage 0 | taps of stage 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_spd import comm, compat
from megatron_spd.errors import ConfigError
from megatron_spd.stage_plan import StagePlan
from megatron_spd.training.data import PackedRows


class StageText(Protocol):
    """What a stage's text forward returns."""

    @property
    def hidden(self) -> Tensor:
        """[B, S, H], un-normed."""

    @property
    def taps(self) -> Sequence[Tensor]:
        """One [B, S, H] for each of `plan.taps_of(stage)`."""


class TextStage(Protocol):
    """The part of `model.TargetStage` that training uses."""

    def embed(self, tokens: Tensor) -> Tensor:
        """[N] to [N, H]; first stage only."""

    def forward_text(self, hidden: Tensor, positions: Tensor, documents: Tensor) -> StageText:
        """The stage's layers over packed rows."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Un-normed [.., H] to float32 logits [.., V]; last stage only."""


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """One micro-batch as the last stage holds it."""

    index: int
    """Which micro-batch of the step, from 0."""
    rows: PackedRows
    hidden: Tensor
    """[B, S, H]: the last boundary, un-normed."""
    taps: Tensor
    """[B, S, T, H]: every tap of the plan, ascending."""


_AtLastStage = Callable[[int, PackedRows, Tensor], Any]
"""(micro-batch, its rows, the message [S, B, (1 + T) * H]) to what the schedule is to get."""


def start_pipeline(plan: StagePlan) -> None:
    """Joins this rank to a Megatron-core pipeline of `plan.num_stages`; torch.distributed is up.

    Raises:
        ConfigError: the plan needs tensor or data parallelism, which training lacks so far.
    """
    if plan.tensor_parallel_size > 1 or plan.data_parallel_size > 1:
        raise ConfigError(
            "training runs one pipeline without tensor parallelism so far; set "
            f"tensor_parallel_size ({plan.tensor_parallel_size}) and data_parallel_size "
            f"({plan.data_parallel_size}) to 1"
        )
    if compat.needed():
        compat.apply()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1, plan.num_stages)
    found = parallel_state.get_pipeline_model_parallel_world_size()
    if found != plan.num_stages:
        raise ConfigError(f"the plan has {plan.num_stages} stages but the pipeline {found} ranks")


def parts_sent(plan: StagePlan, stage: int) -> int:
    """How many [S, B, H] blocks a stage sends: the hidden state and each tap known after it."""
    return 1 + len(plan.taps_known_at(stage + 1))


class StreamedStage(nn.Module):
    """A target stage as Megatron-core's schedule wants it: frozen, or trained with `trainable`."""

    def __init__(
        self,
        stage: nn.Module,
        plan: StagePlan,
        index: int,
        hidden_size: int,
        *,
        trainable: bool = False,
    ) -> None:
        super().__init__()
        stage.requires_grad_(trainable)
        stage.train(trainable)
        self.stage = stage
        self.index = index
        self.plan = plan
        self.hidden_size = hidden_size
        self.trainable = trainable
        self.dtype = next(stage.parameters()).dtype
        self.config = TransformerConfig(
            num_layers=plan.num_layers,
            hidden_size=hidden_size,
            num_attention_heads=1,
            pipeline_dtype=self.dtype,
            pipeline_model_parallel_size=plan.num_stages,
            # The losses of the micro-batches already are shares of the step's mean.
            calculate_per_token_loss=True,
        )
        self.model_type = ModelType.encoder_or_decoder
        self._received: Tensor | None = None

    @property
    def is_last(self) -> bool:
        return self.index == self.plan.num_stages - 1

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Called by the schedule with what the stage before sent."""
        self._received = tensors[0]

    def forward(self, rows: PackedRows) -> Tensor:
        """The message after this stage, [S, B, parts_sent * H]; a frozen stage builds no graph."""
        stage = cast(TextStage, self.stage)
        with torch.set_grad_enabled(self.trainable):
            if self.index == 0:
                tokens = rows.tokens
                hidden = stage.embed(tokens.reshape(-1)).view(*tokens.shape, self.hidden_size)
                known = hidden
            else:
                assert self._received is not None
                message = self._received.transpose(0, 1)
                hidden, known = message[..., : self.hidden_size], message[..., self.hidden_size :]
            out = stage.forward_text(hidden.contiguous(), rows.positions, rows.documents)
            return torch.cat([out.hidden, known, *out.taps], -1).transpose(0, 1).contiguous()


def stream(
    model: StreamedStage, batches: Sequence[PackedRows], consume: Callable[[Arrived], None]
) -> None:
    """Streams micro-batches of one shape forward through the stages, `consume` on the last only.

    `consume` may train the module with gradients enabled.
    """

    def at_last(index: int, rows: PackedRows, message: Tensor) -> int:
        with torch.enable_grad():
            consume(_arrived(index, rows, message, model.hidden_size))
        return index

    _run_schedule(model, batches, at_last, forward_only=True)


def stream_back(
    model: StreamedStage, batches: Sequence[PackedRows], loss_of: Callable[[Arrived], Tensor]
) -> None:
    """Streams micro-batches forward and their gradients back, one forward one backward (1F1B).

    Gradients add up in each parameter's `grad`.

    Args:
        model: a trainable stage.
        loss_of: on the last stage, a micro-batch's share of the step's loss, a scalar. The tensors
            it is given carry the gradient back to the target, unless it detaches them.
    """

    def at_last(index: int, rows: PackedRows, message: Tensor) -> tuple[Tensor, Tensor, int]:
        loss = loss_of(_arrived(index, rows, message, model.hidden_size))
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), index

    _run_schedule(model, batches, at_last, forward_only=False)


def _arrived(index: int, rows: PackedRows, message: Tensor, width: int) -> Arrived:
    parts = message.transpose(0, 1).unflatten(-1, (-1, width))
    return Arrived(index=index, rows=rows, hidden=parts[..., 0, :], taps=parts[..., 1:, :])


def _run_schedule(
    model: StreamedStage,
    batches: Sequence[PackedRows],
    at_last: _AtLastStage,
    *,
    forward_only: bool,
) -> None:
    """Megatron-core's schedule over the micro-batches, messages as wide as the taps make them.

    Raises:
        CommError: another rank is gone.
    """
    size, length = batches[0].tokens.shape
    plan, width = model.plan, model.hidden_size

    def adjusted(*_: object) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        shapes = [
            [(length, size, width * parts_sent(plan, stage))]
            for stage in (max(model.index - 1, 0), model.index)
        ]
        return cast("tuple[list[tuple[int, ...]], list[tuple[int, ...]]]", tuple(shapes))

    def step(source: Iterator[tuple[int, PackedRows]], stage: StreamedStage) -> tuple[Tensor, Any]:
        index, rows = next(source)

        def arrived(message: Tensor, *_: object, **__: object) -> Any:
            return at_last(index, rows, message)

        return stage(rows), arrived

    with compat.cpu_factories(), comm.naming_losses("the stages exchanged micro-batches"):
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(enumerate(batches)),
            model=[model],
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=size,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            adjust_tensor_shapes_fn=adjusted if plan.num_stages > 1 else None,
        )
