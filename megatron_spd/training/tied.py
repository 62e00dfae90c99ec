"""The two ends of a tied target whose embedding and output lie on different ranks.

The embedding of stage 0 is the parameter. The output of the last stage is a copy that no optimizer
knows: its gradient travels to stage 0 and is added there, once, before the norm is taken, and the
new weight travels back after each update. The two are equal bit for bit.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from megatron_spd import comm
from megatron_spd.model.stage import TargetStage
from megatron_spd.training.pipeline import StreamedStage

_GRADIENT_TAG, _WEIGHT_TAG = 9001, 9002


class TiedEnds:
    """One rank's end. A stage in between, like an untied or an uncut target, has nothing to do."""

    def __init__(self, stage: StreamedStage) -> None:
        self.embedding: nn.Parameter | None = None
        """The parameter, on stage 0."""
        self.copy: nn.Parameter | None = None
        """The output's weight, on the last stage."""
        plan, target = stage.plan, cast(TargetStage, stage.stage)
        if plan.num_stages == 1 or not target.spec.tied:
            return
        if stage.index == 0:
            self.embedding, peer = _parameter(target.embedding), plan.stage_ranks[-1]
        elif stage.is_last:
            self.copy, peer = _parameter(target.output), plan.stage_ranks[0]
        else:
            return
        self._gradients = comm.Channel(peer, _GRADIENT_TAG)
        self._weights = comm.Channel(peer, _WEIGHT_TAG)

    def join_gradients(self) -> None:
        """Adds the copy's gradient to the embedding's, when all micro-batches are done.

        Raises:
            CommError: the other end is gone.
        """
        if self.copy is not None:
            gradient = self.copy.grad
            self._gradients.send(torch.zeros_like(self.copy) if gradient is None else gradient)
            self._gradients.flush()
            self.copy.grad = None
        elif self.embedding is not None:
            received = _receive(self._gradients, self.embedding)
            own = self.embedding.grad
            self.embedding.grad = received if own is None else own + received

    @torch.no_grad()
    def spread_weight(self) -> None:
        """Makes the copy equal to the embedding.

        Raises:
            CommError: the other end is gone.
        """
        if self.embedding is not None:
            self._weights.send(self.embedding.clone())
            self._weights.flush()
        elif self.copy is not None:
            self.copy.copy_(_receive(self._weights, self.copy))


def _receive(channel: comm.Channel, like: Tensor) -> Tensor:
    return channel.post_receive(like.shape, like.dtype, like.device).wait()


def _parameter(matrix: nn.Module) -> nn.Parameter:
    return cast(nn.Parameter, matrix.weight)
