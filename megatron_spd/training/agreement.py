"""What the training forward says of texts that decoding wrote: the check on served acceptance.

A text goes through the stages once, in training's own messages, point to point along the plan's
ranks, so that it works for every placement of stages and module. The module then runs its training
forward with every fill of the pipeline, and each position is judged as decoding judges it: the
draft for position p + 1 is made at moment p, in a pipe that holds

    1 token                    behind the first token and behind each correction,
    one more, at most n        behind each accepted draft.

Where decoding and training build the same rows, the flags are the same position by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_spd.comm import Channel
from megatron_spd.sampling import SamplingParams, candidates
from megatron_spd.speculation.module import SpeculationModule
from megatron_spd.stage_plan import StagePlan
from megatron_spd.training.data import PackedRows
from megatron_spd.training.pipeline import StreamedStage, parts_sent

_FORWARD, _BACK = 21, 22


@dataclass(frozen=True, kw_only=True)
class DecodedText:
    """A prompt with what was written behind it."""

    ids: tuple[int, ...]
    """Token ids, the prompt's first."""
    prompt_tokens: int
    """How many of them are the prompt."""


class TextChain:
    """Sends texts through the stages of a plan, to the module's rank. Every rank makes one.

    Args:
        plan: the plan.
        rank: this rank.
        stage: the stage of this rank, None where there is only the module.
        hidden_size: H.
        dtype: of the messages.
    """

    def __init__(
        self,
        plan: StagePlan,
        rank: int,
        stage: StreamedStage | None,
        *,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._plan, self._rank, self._stage = plan, rank, stage
        self._hidden_size, self._dtype = hidden_size, dtype
        last, module = plan.num_stages - 1, plan.module_rank
        index = None if stage is None else stage.index
        self._above = Channel(plan.stage_ranks[index - 1], _FORWARD) if index else None
        self._below: Channel | None = None
        if index is not None and index < last:
            self._below = Channel(plan.stage_ranks[index + 1], _FORWARD)
        elif index == last and rank != module:
            self._below = Channel(module, _BACK)
        self._end: Channel | None = None
        if rank == module and index != last:
            self._end = Channel(plan.stage_ranks[last], _BACK)

    @torch.no_grad()
    def taps(self, ids: Sequence[int]) -> Tensor | None:
        """Taps [1, S, T, H] of one text on the module's rank, None on the others; all ranks call.

        Raises:
            CommError: a peer is gone.
        """
        rows = rows_of(ids, 1)
        message: Tensor | None = None
        if self._stage is not None:
            if self._above is not None:
                self._stage.set_input_tensor(
                    [self._receive(self._above, self._stage.index - 1, rows)]
                )
            message = self._stage(rows)
        if self._below is not None and message is not None:
            self._below.send(message)
            self._below.flush()
        if self._end is not None:
            message = self._receive(self._end, self._plan.num_stages - 1, rows)
        if self._rank != self._plan.module_rank or message is None:
            return None
        parts: Tensor = message.transpose(0, 1).unflatten(-1, (-1, self._hidden_size))
        return parts[..., 1:, :]

    def _receive(self, channel: Channel, stage: int, rows: PackedRows) -> Tensor:
        batch, length = rows.tokens.shape
        shape = (length, batch, parts_sent(self._plan, stage) * self._hidden_size)
        return channel.post_receive(shape, self._dtype).wait()


def rows_of(ids: Sequence[int], copies: int) -> PackedRows:
    """One text as packed rows of its length, `copies` times: [copies, S]."""
    tokens = torch.tensor(ids, dtype=torch.int64).expand(copies, -1)
    positions = torch.arange(len(ids)).expand(copies, -1)
    return PackedRows(tokens=tokens, positions=positions, documents=torch.zeros_like(positions))


@torch.no_grad()
def judge_text(
    module: SpeculationModule, taps: Tensor, text: DecodedText, sampling: SamplingParams
) -> list[bool]:
    """Whether training's draft is the text's token, at each position behind the first written one.

    Args:
        module: the module, in the dtype it is trained in.
        taps: [1, S, T, H], of `TextChain.taps`.
        text: the text; its last token is judged too.
        sampling: how it was decoded.
    """
    num_stages = module.plan.num_stages
    rows = rows_of(text.ids, num_stages)
    fills = torch.arange(1, num_stages + 1).unsqueeze(1).expand_as(rows.tokens)
    dtype = next(module.parameters()).dtype
    copies = taps.to(dtype).expand(num_stages, -1, -1, -1)
    newest = module.forward_moments(copies, rows.positions, rows.documents, fills).hidden[:, :, 0]
    flags: list[bool] = []
    fill = 1
    for moment in range(text.prompt_tokens, len(text.ids) - 1):
        logits = module.logits(newest[fill - 1, moment])
        drafted, _ = candidates(logits, module.draft_ids, sampling, moment + 1, 1)
        flags.append(int(drafted[0]) == text.ids[moment + 1])
        fill = min(fill + 1, num_stages) if flags[-1] else 1
    return flags
