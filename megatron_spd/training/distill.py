"""Distillation of the speculation module from the frozen target, one micro-batch at a time.

The row of depth d at moment u stands at text index u - d and predicts the token after it, so its
teacher is the target's distribution at index u - d. How full the pipeline was at each moment is
drawn from what decoding produces at the running acceptance, out of (seed, step, micro-batch) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from megatron_spd.errors import ConfigError, ScheduleError
from megatron_spd.schedule.depths import in_flight
from megatron_spd.speculation.losses import distillation_loss, fill_distribution
from megatron_spd.training.data import PackedRows, seed_of
from megatron_spd.training.pipeline import Arrived

if TYPE_CHECKING:
    from megatron_spd.speculation.module import SpeculationModule

START_ACCEPTANCE = 0.5
ACCEPTANCE_MEMORY = 0.9
"""Share of the running acceptance that a step keeps."""


class Moments(Protocol):
    """What the module's training forward returns."""

    @property
    def hidden(self) -> Tensor:
        """[B, S, n, H]: the row of depth d at moment u."""

    @property
    def valid(self) -> Tensor:
        """bool [B, S, n]: which of them exist."""


class MomentModule(Protocol):
    """The part of `speculation.SpeculationModule` that distillation uses."""

    def forward_moments(
        self, taps: Tensor, positions: Tensor, documents: Tensor, fill: Tensor
    ) -> Moments:
        """Taps [B, S, T, H] and int64 [B, S] each to the rows of every moment."""


@dataclass(frozen=True, kw_only=True)
class RowLoss:
    """The loss of M rows."""

    loss: Tensor
    """Sum over the rows, float32 scalar with a gradient."""
    agreed: int
    """Rows whose most probable draft is the target's most probable token."""


RowLossFunction = Callable[[Tensor, Tensor, float], RowLoss]
"""(module rows [M, H], target rows [M, H] un-normed, running acceptance) to their loss."""


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """Sums over the rows of one or more micro-batches, for the log and the running acceptance."""

    loss: float = 0.0
    """Weighted sum of the rows' losses."""
    rows: int = 0
    """Rows that the loss is a sum over, all depths."""
    drafts: int = 0
    """Rows of depth 0: what decoding would have drafted."""
    agreed: int = 0
    """Of these, how many name the target's own most probable token."""

    def __add__(self, other: StepSums) -> StepSums:
        return StepSums(
            loss=self.loss + other.loss,
            rows=self.rows + other.rows,
            drafts=self.drafts + other.drafts,
            agreed=self.agreed + other.agreed,
        )

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.rows, 1)

    @property
    def agreement(self) -> float:
        return self.agreed / max(self.drafts, 1)


def next_acceptance(acceptance: float, sums: StepSums) -> float:
    """The running acceptance after a step; unchanged by a step without drafts."""
    if not sums.drafts:
        return acceptance
    return ACCEPTANCE_MEMORY * acceptance + (1 - ACCEPTANCE_MEMORY) * sums.agreement


def draw_fill(rows: PackedRows, acceptance: float, num_stages: int, *seeds: object) -> Tensor:
    """Tokens in flight at each moment, int64 [B, S] in 1..num_stages, a function of `seeds`."""
    generator = torch.Generator().manual_seed(seed_of("fill", *seeds))
    weights = fill_distribution(acceptance, num_stages)
    drawn = torch.multinomial(weights, rows.tokens.numel(), replacement=True, generator=generator)
    return drawn.view(rows.tokens.shape) + 1


def count_rows(rows: PackedRows, fill: Tensor, num_stages: int) -> int:
    """How many rows (moment u, depth d < fill[u], same document) the module is trained on."""
    documents, length, found = rows.documents, rows.documents.shape[1], 0
    for depth in range(min(num_stages, length)):
        newest, here = documents[:, depth:], documents[:, : length - depth]
        found += int(((newest == here) & (newest >= 0) & in_flight(depth, fill[:, depth:])).sum())
    return found


def check_depth_weights(weights: Sequence[float], num_stages: int) -> None:
    """Refuses weights that are not one for each depth; none at all is fine.

    Raises:
        ConfigError: naming both counts.
    """
    if weights and len(weights) != num_stages:
        raise ConfigError(
            f"train.depth_weights has {len(weights)} weights, the plan has {num_stages} stages "
            "and so as many depths; give one for each"
        )


class Distillation(nn.Module):
    """The module with its loss, for the DeepSpeed engine; no parameters but the module's.

    Args:
        module: the module to train.
        row_loss: loss of its rows.
        num_stages: depths that it is trained at.
        depth_weights: weight of the loss of each depth's rows; empty weighs them alike.

    Raises:
        ConfigError: not one weight for each depth.
    """

    def __init__(
        self,
        module: nn.Module,
        row_loss: RowLossFunction,
        *,
        num_stages: int,
        depth_weights: Sequence[float] = (),
    ) -> None:
        super().__init__()
        self.module = module
        self.num_stages = num_stages
        self.depth_weights = tuple(depth_weights) or (1.0,) * num_stages
        check_depth_weights(self.depth_weights, num_stages)
        self._row_loss = (row_loss,)
        self.sums = StepSums()

    def forward(self, arrived: Arrived, fill: Tensor, acceptance: float, total_rows: int) -> Tensor:
        """This micro-batch's share of the step's mean weighted loss; adds to `sums`.

        Args:
            fill: int64 [B, S], tokens in flight at each moment.
            acceptance: running acceptance, for the blended loss.
            total_rows: rows of all micro-batches of the step, so that shares add up to the mean.

        Raises:
            ScheduleError: the module's rows are not those that `count_rows` counts.
        """
        rows = arrived.rows
        module = cast(MomentModule, self.module)
        moments = module.forward_moments(arrived.taps.float(), rows.positions, rows.documents, fill)
        expected = count_rows(rows, fill, self.num_stages)
        batch, moment, depth = moments.valid.nonzero(as_tuple=True)
        if len(batch) != expected:
            raise ScheduleError(f"the module has {len(batch)} rows to train, expected {expected}")
        loss, agreed = arrived.hidden.new_zeros((), dtype=torch.float32), 0
        for at_depth, weight in enumerate(self.depth_weights):
            part = (depth == at_depth).nonzero()[:, 0]
            if not len(part) or not weight:
                continue
            at = batch[part], moment[part], depth[part]
            student = moments.hidden[at]
            result = self._row_loss[0](student, arrived.hidden[at[0], at[1] - at[2]], acceptance)
            loss = loss + weight * result.loss
            agreed = result.agreed if at_depth == 0 else agreed
        self.sums += StepSums(
            loss=float(loss.detach()),
            rows=expected,
            drafts=int((depth == 0).sum()),
            agreed=agreed,
        )
        return loss / max(total_rows, 1)


def row_loss_of(
    module: SpeculationModule, teacher_logits: Callable[[Tensor], Tensor], kind: str
) -> RowLossFunction:
    """The loss of the speculation module's rows against the target's full distribution.

    Args:
        teacher_logits: un-normed target rows [M, H] to logits [M, V].
        kind: one of `speculation.losses.LOSSES`.
    """

    def row_loss(student: Tensor, teacher: Tensor, acceptance: float) -> RowLoss:
        sums = distillation_loss(
            student,
            module.logits,
            teacher,
            torch.no_grad()(teacher_logits),
            module.draft_ids,
            torch.ones(len(student), device=student.device),
            kind=kind,
            acceptance=acceptance,
        )
        return RowLoss(loss=sums.loss, agreed=round(float(sums.agreement)))

    return row_loss


@dataclass(frozen=True, kw_only=True)
class DrawnStep:
    """What is random in one step, drawn before it starts."""

    fills: tuple[Tensor, ...]
    total_rows: int

    @classmethod
    def draw(
        cls,
        batches: Sequence[PackedRows],
        *,
        acceptance: float,
        num_stages: int,
        seed: int,
        step: int,
    ) -> DrawnStep:
        """The fill of every micro-batch of a step and the number of rows they make together."""
        fills = tuple(
            draw_fill(rows, acceptance, num_stages, seed, step, index)
            for index, rows in enumerate(batches)
        )
        counts = [
            count_rows(rows, fill, num_stages) for rows, fill in zip(batches, fills, strict=True)
        ]
        return cls(fills=fills, total_rows=sum(counts))
