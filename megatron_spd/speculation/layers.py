"""A Llama-style decoder layer whose attention is left to the caller.

Serving attends over KV rows and training over moments; both use the same projections, so what is
trained is what is served.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_spd.rope import apply_rope
from megatron_spd.speculation.config import ModuleConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm computed in float32, as Llama does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        return rms_norm(hidden, self.weight, self.eps)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., H] normed in float32 (float64 stays), scaled by weight [H], in hidden's dtype."""
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(hidden.dtype)


class DecoderLayer(nn.Module):
    """RMSNorm, GQA with RoPE, RMSNorm, SwiGLU; no biases."""

    def __init__(self, config: ModuleConfig) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.input_norm = RMSNorm(hidden, config.norm_eps)
        self.q_proj = nn.Linear(hidden, query, bias=False)
        self.k_proj = nn.Linear(hidden, key, bias=False)
        self.v_proj = nn.Linear(hidden, key, bias=False)
        self.o_proj = nn.Linear(query, hidden, bias=False)
        self.post_norm = RMSNorm(hidden, config.norm_eps)
        self.gate_proj = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)

    def project(self, hidden: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, of rows.

        Args:
            hidden: [..., H].
            angles: [N, head_dim], N the number of rows of hidden in order.

        Returns:
            query [..., heads, head_dim], key and value [..., kv_heads, head_dim].
        """
        lead = hidden.shape[:-1]
        flat = self.input_norm(hidden).flatten(0, -2)
        query = apply_rope(self.q_proj(flat).unflatten(-1, (self.num_heads, -1)), angles)
        key = apply_rope(self.k_proj(flat).unflatten(-1, (self.num_kv_heads, -1)), angles)
        value = self.v_proj(flat).unflatten(-1, (self.num_kv_heads, -1))
        return query.unflatten(0, lead), key.unflatten(0, lead), value.unflatten(0, lead)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """hidden [..., H] and attended [..., heads, head_dim] to the layer's output [..., H]."""
        hidden = hidden + self.o_proj(attended.flatten(-2))
        normed = self.post_norm(hidden)
        mlp: Tensor = self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return hidden + mlp
