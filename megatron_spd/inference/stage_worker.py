"""What a stage does for ever: receive a wave, forward it, send it on, send its taps to the driver.

There is no broadcast, no barrier and no command besides the wave's own header.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from megatron_spd.kv_rows import KvRows
from megatron_spd.sampling import SamplingParams, choose
from megatron_spd.wave import WaveHeader

if TYPE_CHECKING:
    from megatron_spd.model.stage import TargetStage


@dataclass(frozen=True, kw_only=True)
class WaveResult:
    """What leaves a stage. N nodes, T taps of the stage, H hidden size."""

    hidden: Tensor  # [N, H]
    taps: Tensor  # [T, N, H]
    tokens: Tensor | None  # int64 [N] on the last stage, -1 where nothing was asked


class StageCompute(Protocol):
    """A stage as the loops see it."""

    def step(self, header: WaveHeader, hidden: Tensor | None) -> WaveResult:
        """Forward one wave; stage 0 gets no hidden states, it embeds the header's tokens."""
        ...


class TargetCompute:
    """A stage of the target with its KV rows."""

    def __init__(self, model: TargetStage, kv: KvRows, *, is_last: bool) -> None:
        self.model, self.kv, self.is_last = model, kv, is_last

    @torch.inference_mode()
    def step(self, header: WaveHeader, hidden: Tensor | None) -> WaveResult:
        """Insert the wave's rows, apply its commits, forward it, and on the last stage choose."""
        positions, rows = torch.tensor(header.positions), torch.tensor(header.rows)
        visible = open_wave(self.kv, header, positions, rows)
        if hidden is None:
            hidden = self.model.embed(torch.tensor(header.tokens))
        out = self.model.forward_rows(hidden, positions, rows, visible, self.kv)
        taps = torch.stack(out.taps) if out.taps else hidden.new_empty(0, *hidden.shape)
        tokens = self._choose(header, out.hidden) if self.is_last else None
        return WaveResult(hidden=out.hidden, taps=taps, tokens=tokens)

    def _choose(self, header: WaveHeader, hidden: Tensor) -> Tensor:
        tokens = torch.full((header.num_nodes,), -1, dtype=torch.int64)
        asked = [i for i, judged in enumerate(header.judged) if judged]
        if asked:
            fields: dict[int, SamplingParams] = dict(header.sampling)
            params = [fields[header.requests[i]] for i in asked]
            behind = torch.tensor([header.positions[i] + 1 for i in asked])
            tokens[asked] = choose(self.model.logits(hidden[asked]), params, behind)
        return tokens


def open_wave(kv: KvRows, header: WaveHeader, positions: Tensor, rows: Tensor) -> Tensor:
    """Insert a wave's rows, apply its commits, and return what its nodes see, bool [N, high]."""
    kv.insert(rows, positions)
    if header.commits:
        committed, requests = zip(*header.commits, strict=True)
        kv.commit(torch.tensor(committed), torch.tensor(requests))
    width = max((len(found) for found in header.ancestors), default=0)
    ancestors = torch.full((header.num_nodes, width), -1, dtype=torch.int64)
    for node, found in enumerate(header.ancestors):
        ancestors[node, : len(found)] = torch.tensor(found, dtype=torch.int64)
    return kv.visible(rows, torch.tensor(header.requests), positions, ancestors)
