"""Rotary position embedding, in the half-rotation layout of the Hugging Face Llama family."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_spd.errors import ConfigError
from megatron_spd.target_spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians a position of each pair: float32 [head_dim / 2].

    Raises:
        ConfigError: a rope type other than `default` and `llama3`.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "default":
        return base
    if rope.rope_type != "llama3":
        raise ConfigError(f"rope type {rope.rope_type!r} is not supported")
    assert rope.factor and rope.low_freq_factor and rope.high_freq_factor
    assert rope.original_max_position_embeddings
    trained = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / base
    slowed = base / rope.factor
    share = (trained / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - share) * slowed + share * base
    kept = torch.where(wavelengths < trained / rope.high_freq_factor, base, between)
    return torch.where(wavelengths > trained / rope.low_freq_factor, slowed, kept)


def rope_angles(rope: RopeSpec, head_dim: int, positions: Tensor) -> Tensor:
    """Angles of int64 `positions` [N]: float32 [N, head_dim], the half repeated."""
    inverse = inverse_frequencies(rope, head_dim).to(positions.device)
    half = positions.to(torch.float32).unsqueeze(-1) * inverse
    return torch.cat((half, half), dim=-1)


def apply_rope(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate `x` [N, heads, head_dim] by `angles` [N, head_dim]; dtype and shape stay."""
    cos = angles.cos().to(x.dtype).unsqueeze(-2)
    sin = angles.sin().to(x.dtype).unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
