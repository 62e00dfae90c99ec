"""Distillation from the target's full distribution, in float32 and in chunks over tokens.

With p the target's distribution, D the draft vocabulary and q the module's distribution over it,
a shared-noise or rejection drafter is right about as often as `overlap = sum over D of min(p, q)`:
what the target puts outside D is lost, and every loss here charges it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_spd.errors import ConfigError

LOSSES = ("kl", "tv", "overlap", "blend")
OUTSIDE_MASS = 1e-4
"""What the KL grants the module on all tokens outside its vocabulary, so that it stays finite."""
_TINY = 1e-8


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """Weighted sums over tokens; divide by `weight` after adding over ranks and micro-batches."""

    loss: Tensor
    """Scalar with gradient."""
    weight: Tensor
    """Sum of the token weights."""
    overlap: Tensor
    """Sum of overlap, detached."""
    agreement: Tensor
    """Sum over tokens where both argmaxes are the same token, detached."""


def fill_distribution(acceptance: float, num_stages: int) -> Tensor:
    """Chance of 1..n tokens in flight when decoding one chain: float64 [n].

    After a rejection the pipe refills from 1; it reaches k + 1 if the next judgement accepts.

    Raises:
        ConfigError: an acceptance outside 0..1 or no stage.
    """
    if not 0.0 <= acceptance <= 1.0 or num_stages < 1:
        raise ConfigError(f"acceptance {acceptance} or num_stages {num_stages} is out of range")
    powers = torch.tensor([acceptance**k for k in range(num_stages)], dtype=torch.float64)
    powers[:-1] *= 1.0 - acceptance
    return powers


def blend_weight(acceptance: float) -> float:
    """The KL share of `blend`: all of it at first, 5 % for an always-right module."""
    return math.exp(-3.0 * acceptance)


def token_losses(
    draft_logits: Tensor, target_logits: Tensor, draft_ids: Tensor, kind: str, acceptance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, overlap and agreement of each token.

    Args:
        draft_logits: [N, Vd].
        target_logits: [N, V].
        draft_ids: int64 [Vd].
        kind: kl, tv (1 - overlap), overlap (-log overlap) or blend of kl and overlap.
        acceptance: 0..1, sets the KL share of `blend`.

    Returns:
        three [N] tensors in float32 (float64 if both inputs are).

    Raises:
        ConfigError: an unknown kind.
    """
    if kind not in LOSSES:
        raise ConfigError(f"loss {kind!r} is not one of {', '.join(LOSSES)}")
    log_q = _wide(draft_logits).log_softmax(-1)
    log_full = _wide(target_logits).log_softmax(-1)
    log_p = log_full[:, draft_ids]
    p, q = log_p.exp(), log_q.exp()
    overlap = torch.minimum(p, q).sum(-1)
    winners = draft_ids[draft_logits.argmax(-1)]
    agreement = (winners == target_logits.argmax(-1)).to(overlap.dtype)
    if kind == "tv":
        return 1.0 - overlap, overlap, agreement
    hard = -overlap.clamp(min=_TINY).log()
    if kind == "overlap":
        return hard, overlap, agreement
    kl = _divergence(log_p, log_q, log_full, draft_ids)
    if kind == "kl":
        return kl, overlap, agreement
    share = blend_weight(acceptance)
    return share * kl + (1.0 - share) * hard, overlap, agreement


def _divergence(log_p: Tensor, log_q: Tensor, log_full: Tensor, draft_ids: Tensor) -> Tensor:
    """KL [N] from p to the module's q on D with OUTSIDE_MASS on the rest, if there is a rest."""
    p = log_p.exp()
    # where p underflows to 0 its logarithm may be -inf (masked logits); the term is then 0
    inside = (p * (log_p.clamp(min=-1e4) - log_q.clamp(min=-1e4))).sum(-1)
    if draft_ids.numel() == log_full.shape[-1]:
        return inside
    outside_ids = torch.ones(log_full.shape[-1], dtype=torch.bool, device=draft_ids.device)
    outside_ids[draft_ids] = False
    outside = log_full.exp()[:, outside_ids].sum(-1)
    kept = p.sum(-1)
    charge = outside * (outside.clamp(min=1e-30).log() - math.log(OUTSIDE_MASS))
    return inside - kept * math.log1p(-OUTSIDE_MASS) + charge


def distillation_loss(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    target: Tensor,
    target_head: Callable[[Tensor], Tensor],
    draft_ids: Tensor,
    weights: Tensor,
    *,
    target_rows: Tensor | None = None,
    kind: str = "kl",
    acceptance: float = 0.0,
    chunk_tokens: int = 256,
) -> LossSums:
    """Weighted sums of the loss over tokens; only one chunk's logits exist at a time.

    Args:
        hidden: [N, H], the module's rows.
        head: rows to draft logits [., Vd], such as `SpeculationModule.logits`.
        target: [M, any], what target_head reads: boundary L, or the logits themselves.
        target_head: target rows to logits [., V].
        draft_ids: int64 [Vd].
        weights: [N]; rows of weight 0 are left out before anything is computed.
        target_rows: int64 [N], the target row of each of the module's; the same row if left out.
        kind: see `token_losses`.
        acceptance: see `token_losses`.
        chunk_tokens: tokens computed together; sets memory, not the result.

    Raises:
        ConfigError: an unknown kind.
    """
    if kind not in LOSSES:
        raise ConfigError(f"loss {kind!r} is not one of {', '.join(LOSSES)}")
    kept = weights.nonzero().flatten()
    places = kept if target_rows is None else target_rows[kept]

    def chunk(rows: Tensor, sources: Tensor) -> Tensor:
        loss, overlap, agreement = token_losses(
            head(hidden[rows]), target_head(target[sources]), draft_ids, kind, acceptance
        )
        scale = weights[rows].to(loss.dtype)
        return torch.stack([(part * scale).sum() for part in (loss, overlap, agreement)])

    sums = hidden.new_zeros(3, dtype=_wide(hidden[:0]).dtype) + 0.0 * _wide(hidden[:0]).sum()
    for rows, sources in zip(kept.split(chunk_tokens), places.split(chunk_tokens), strict=True):
        if torch.is_grad_enabled():
            part: Tensor = checkpoint(chunk, rows, sources, use_reentrant=False)
        else:
            part = chunk(rows, sources)
        sums = sums + part
    return LossSums(
        loss=sums[0],
        weight=_wide(weights).sum(),
        overlap=sums[1].detach(),
        agreement=sums[2].detach(),
    )


def _wide(values: Tensor) -> Tensor:
    """Values in float32 at least."""
    return values if values.dtype == torch.float64 else values.float()
