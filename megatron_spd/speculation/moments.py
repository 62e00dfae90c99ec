"""Training rows: for every moment of a text, the rows a draft would read, and their attention.

Moment u is the time when the newest token is the one at index u, with F = fill[u] tokens in
flight. The row of depth d < F stands for index u - d; everything at index u - F or before is
complete and has one row shared by all moments, the deepest. n = 3, u = 6:

    index   ...  2   3   4   5   6
    F = 3        D   D   2   1   0      D: deepest, shared; a digit: the moment's own row
    F = 1        D   D   D   D   0

A moment's row sees its older siblings and the deepest rows behind them: a dense causal part and a
band of at most n, merged by their log-sum-exp. No mask over all rows is ever built.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_spd.attention import masked_attention
from megatron_spd.schedule.depths import in_flight

CHUNK_MOMENTS = 64


@dataclass(frozen=True, kw_only=True)
class MomentRows:
    """What the module's layers say of every row of a text, before the final norm."""

    hidden: Tensor
    """[B, S, n, H]: of moment u, the row of depth d, for index u - d."""
    valid: Tensor
    """bool [B, S, n]: d < fill[u], and index u - d is in u's document."""
    deepest: Tensor
    """[B, S, H]: the row of an index that has left the pipeline."""


def valid_rows(documents: Tensor, fill: Tensor, num_stages: int) -> Tensor:
    """Which (moment, depth) rows exist: bool [B, S, n] of documents and fill, both [B, S]."""
    index = torch.arange(documents.shape[1], device=documents.device)
    depth = torch.arange(num_stages, device=documents.device)
    source = index[:, None] - depth
    same = documents[:, source.clamp(min=0)] == documents.unsqueeze(-1)
    inside = (source >= 0) & same & (documents >= 0).unsqueeze(-1)
    rows: Tensor = inside & in_flight(depth, fill.unsqueeze(-1))
    return rows


def shift_to_moments(values: Tensor, depth: int) -> Tensor:
    """[B, S, ...] to the same shape, entry u holding index u - depth (index 0 before the text)."""
    if depth == 0:
        return values
    index = (torch.arange(values.shape[1], device=values.device) - depth).clamp(min=0)
    return values[:, index]


def deepest_attention(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    """Causal attention within documents.

    Args:
        query: [B, S, heads, head_dim].
        key: [B, S, kv_heads, head_dim].
        value: [B, S, kv_heads, head_dim].
        documents: int64 [B, S].

    Returns:
        [B, S, heads, head_dim].
    """
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return masked_attention(
        query, key, value, causal & (documents.unsqueeze(2) == documents.unsqueeze(1))
    )


def moment_attention(
    own: tuple[Tensor, Tensor, Tensor],
    deepest: tuple[Tensor, Tensor],
    documents: Tensor,
    fill: Tensor,
    chunk_moments: int = CHUNK_MOMENTS,
) -> Tensor:
    """Attention of the moments' rows over their older siblings and the deepest rows.

    Args:
        own: query [B, S, n, heads, head_dim], key and value [B, S, n, kv_heads, head_dim].
        deepest: key and value [B, S, kv_heads, head_dim].
        documents: int64 [B, S], -1 for padding.
        fill: int64 [B, S], tokens in flight at each moment, 1..n.
        chunk_moments: moments attended together; memory grows with it, results do not change.

    Returns:
        [B, S, n, heads, head_dim]. Rows that are not valid see only themselves and their like.
    """
    length, num_stages = own[0].shape[1:3]
    valid = valid_rows(documents, fill, num_stages)
    parts: list[Tensor] = []
    for start in range(0, length, chunk_moments):
        stop = min(start + chunk_moments, length)
        args = (
            *(tensor[:, start:stop] for tensor in own),
            *(tensor[:, :stop] for tensor in deepest),
            _dense_mask(documents, fill, start, stop),
            valid[:, start:stop],
        )
        if torch.is_grad_enabled() and length > chunk_moments:
            parts.append(checkpoint(_attend_chunk, *args, use_reentrant=False))
        else:
            parts.append(_attend_chunk(*args))
    return torch.cat(parts, 1)


def _dense_mask(documents: Tensor, fill: Tensor, start: int, stop: int) -> Tensor:
    """bool [B, C, stop]: the deepest rows that moments [start, stop) see."""
    moment = torch.arange(start, stop, device=documents.device)
    index = torch.arange(stop, device=documents.device)
    complete: Tensor = ~in_flight(moment[:, None] - index, fill[:, start:stop, None])
    return complete & (documents[:, start:stop, None] == documents[:, None, :stop])


def _attend_chunk(
    query: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    deep_key: Tensor,
    deep_value: Tensor,
    dense: Tensor,
    valid: Tensor,
) -> Tensor:
    """One chunk of `moment_attention`: [B, C, n, heads, head_dim]."""
    batch, chunk, depths, heads, dim = query.shape
    groups = own_key.shape[3]
    # [B, G, R, C, n, D]: R query heads share each of the G key heads
    query = query.unflatten(3, (groups, -1)).permute(0, 3, 4, 1, 2, 5) * dim**-0.5
    deep = query.flatten(2, 4) @ deep_key.permute(0, 2, 3, 1)
    deep = _wide(deep).unflatten(2, (-1, chunk, depths))
    deep = deep.masked_fill(~dense[:, None, None, :, None, :], -torch.inf)
    band = _wide(query @ own_key.permute(0, 3, 1, 4, 2).unsqueeze(2))
    depth = torch.arange(depths, device=query.device)
    older = (depth >= depth[:, None]) & valid.unsqueeze(2) | (depth == depth[:, None])
    band = band.masked_fill(~older[:, None, None], -torch.inf)
    # each part's softmax is weighted by its share of the joint normaliser
    peak = torch.maximum(deep.amax(-1, keepdim=True), band.amax(-1, keepdim=True)).detach()
    deep, band = (deep - peak).exp(), (band - peak).exp()
    total = deep.sum(-1, keepdim=True) + band.sum(-1, keepdim=True)
    deep, band = (deep / total).to(query.dtype), (band / total).to(query.dtype)
    far = (deep.flatten(2, 4) @ deep_value.transpose(1, 2)).unflatten(2, (-1, chunk, depths))
    near = band @ own_value.permute(0, 3, 1, 2, 4).unsqueeze(2)
    merged: Tensor = far + near
    return merged.permute(0, 3, 4, 1, 2, 5).reshape(batch, chunk, depths, heads, dim)


def _wide(scores: Tensor) -> Tensor:
    """Scores in float32 at least."""
    return scores if scores.dtype == torch.float64 else scores.float()
