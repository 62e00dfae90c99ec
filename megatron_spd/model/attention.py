"""RowAttention: the core attention inside Megatron's layers, over KV rows or over whole texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_spd.attention import masked_attention
from megatron_spd.kv_rows import KvRows
from megatron_spd.rope import apply_rope


@dataclass(frozen=True, kw_only=True)
class RowsView:
    """A wave: N nodes, one row each."""

    angles: Tensor
    """RoPE angles [N, head_dim]."""
    rows: Tensor
    """Row of each node, int64 [N]."""
    visible: Tensor
    """Rows a node attends to, bool [N, high]."""
    kv: KvRows


@dataclass(frozen=True, kw_only=True)
class TextView:
    """Whole texts, B of length S."""

    angles: Tensor
    """RoPE angles [S, B, head_dim]."""
    visible: Tensor
    """Who attends to whom, bool [B, S, S]."""


class RowAttention(MegatronModule):
    """Rotates query and key, and attends to what `view` says. It has no weights.

    The stage sets `view` before it runs its layers; `local_layer` is the layer's index in its
    stage, and so in the stage's KvRows.
    """

    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.local_layer = 0
        self.view: RowsView | TextView | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> Tensor:
        """[S, B, heads, d] and [S, B, kv_heads, d] twice to [S, B, heads * d]; rows have B = 1."""
        view = self.view
        if view is None:
            raise RuntimeError("RowAttention runs only inside TargetStage")
        if isinstance(view, TextView):
            return self._text(view, query, key, value)
        return self._rows(view, query[:, 0], key[:, 0], value[:, 0])

    def _text(self, view: TextView, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = apply_rope(query, view.angles), apply_rope(key, view.angles)
        mixed = masked_attention(
            query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), view.visible
        )
        return mixed.transpose(0, 1).flatten(2)

    def _rows(self, view: RowsView, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = apply_rope(query, view.angles), apply_rope(key, view.angles)
        view.kv.write(self.local_layer, view.rows, key, value)
        high = view.visible.shape[1]
        keys, values = (
            part[None, self.local_layer, :high] for part in (view.kv.keys, view.kv.values)
        )
        mixed = masked_attention(query[None], keys, values, view.visible[None])
        return mixed[0].flatten(1).unsqueeze(1)
