"""Grouped attention with a mask: one function for the target's stages and the module."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def masked_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Plain attention with a mask; each query must see at least one key.

    Args:
        query: [B, N, heads, head_dim].
        key: [B, K, kv_heads, head_dim].
        value: [B, K, kv_heads, head_dim].
        visible: bool [B, N, K].

    Returns:
        [B, N, heads, head_dim].
    """
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=visible.unsqueeze(1),
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return attended.transpose(1, 2)
