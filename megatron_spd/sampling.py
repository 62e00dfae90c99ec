"""The target's choice at a position, as a pure function of logits, sampling fields and seed.

The noise is counter-based: the Gumbel value of token ``t`` at position ``p`` under ``seed`` is
one Philox4x32-10 block of the counter ``(t, p)`` under the key ``seed``. So it does not depend on
batch, on order, on device or on which other tokens are asked about, and the speculation module
can draft with the very noise the target will choose with.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_spd.errors import ConfigError, SpdError

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_SMALLEST_TEMPERATURE = 1e-6
_FILTERED_PENALTY = 1e6


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen; refused by ``ConfigError`` when out of range.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep every token. The filters apply
    in that order to ``softmax(logits / temperature)``. ``seed`` is an unsigned 64-bit integer.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        warm = _SMALLEST_TEMPERATURE <= self.temperature < math.inf
        if self.temperature != 0 and not warm:
            raise ConfigError(
                f"temperature is {self.temperature}, expected 0 or a finite number "
                f"of at least {_SMALLEST_TEMPERATURE}"
            )
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}, expected 0 (no limit) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}, expected more than 0 and at most 1")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed is {self.seed}, expected 0 to 2**64 - 1")

    @property
    def greedy(self) -> bool:
        """True when no noise is added."""
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """True when top-k or top-p may remove tokens."""
        return self.top_k > 0 or self.top_p < 1


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four int64 tensors of one shape holding 32-bit words, to four such words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product wraps in int64, but its 64 bits are those of the unsigned product.
        left = c0 * _MULTIPLIERS[0]
        right = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((right >> 32) & _MASK) ^ c1 ^ k0,
            right & _MASK,
            ((left >> 32) & _MASK) ^ c3 ^ k1,
            left & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel(seed: int, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float64 ``[N, V]``, of tokens ``ids [V]`` at ``positions [N]``."""
    position = positions.to(torch.int64)[:, None]
    token = ids.to(torch.int64)[None, :]
    zero = torch.zeros_like(position + token)
    words = philox(
        (token + zero, (position & _MASK) + zero, ((position >> 32) & _MASK) + zero, zero),
        (seed & _MASK, (seed >> 32) & _MASK),
    )
    # 52 bits and a half: exact in float64 and never 0 or 1.
    bits = (words[0] << 20) | (words[1] >> 12)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def choose(logits: Tensor, params: Sequence[SamplingParams], positions: Tensor) -> Tensor:
    """The tokens the target picks, int64 ``[N]``, from ``logits [N, V]``.

    ``params`` holds one entry a row; ``positions`` int64 ``[N]`` is the position of the token
    being chosen. Ties go to the lowest id. Raises ``SpdError`` where a row's largest logit is not
    finite.
    """
    if logits.dim() != 2 or len(params) != logits.shape[0] or len(positions) != len(params):
        raise SpdError(
            f"choose got logits {tuple(logits.shape)}, {len(params)} params and "
            f"{len(positions)} positions, expected [N, V], N and N"
        )
    if not params:
        return torch.zeros(0, dtype=torch.int64, device=logits.device)
    scores = logits.to(torch.float64)
    warm = [row for row, fields in enumerate(params) if not fields.greedy]
    if warm:
        ids = torch.arange(logits.shape[1], device=logits.device)
        rows = [
            _scores(scores[row], params[row], positions[row : row + 1].to(ids.device), ids)
            for row in warm
        ]
        scores = scores.index_copy(0, torch.tensor(warm, device=ids.device), torch.stack(rows))
    return _first_largest(scores)


def candidates(
    draft_logits: Tensor, draft_ids: Tensor, params: SamplingParams, position: int, width: int
) -> tuple[Tensor, Tensor]:
    """The module's best guesses at what ``choose`` will pick at ``position``, best first.

    ``draft_logits [Vd]`` are in the row order of ``draft_ids`` int64 ``[Vd]``. Returns at most
    ``width`` distinct token ids, int64 ``[W]``, and their log-probabilities under the draft at the
    request's temperature (1 when greedy), float32 ``[W]``. Tokens that the filters remove from the
    draft come last.
    """
    ids = draft_ids.to(torch.int64)
    width = min(width, len(ids))
    noise = None
    if not params.greedy:
        noise = gumbel(params.seed, torch.tensor([position], device=ids.device), ids)
    scores = draft_scores(draft_logits[None], ids, params, noise)[0]
    scaled = draft_logits.to(torch.float64) / (params.temperature or 1.0)
    if width < 1:
        return ids[:0], scaled[:0].to(torch.float32)
    floor = torch.topk(scores, width).values[-1]
    rows = torch.nonzero(scores >= floor)[:, 0]
    rows = rows[torch.argsort(ids[rows])]
    rows = rows[torch.argsort(scores[rows], descending=True, stable=True)][:width]
    log_probs = scaled[rows] - torch.logsumexp(scaled, dim=0)
    return ids[rows], log_probs.to(torch.float32)


def draft_scores(
    draft_logits: Tensor, draft_ids: Tensor, params: SamplingParams, noise: Tensor | None
) -> Tensor:
    """What ``candidates`` ranks by, float64 ``[N, Vd]``: ``logits / T + noise`` of N rows.

    ``noise`` is ``gumbel`` of ``draft_ids`` at the rows' positions, or None when greedy. Tokens
    that the filters remove from the draft get a score far below all others.
    """
    scaled = draft_logits.to(torch.float64) / (params.temperature or 1.0)
    if noise is None:
        return scaled
    scores = scaled + noise
    if params.filters:
        kept = torch.stack([_kept(row, params, draft_ids) for row in scaled])
        scores = torch.where(kept, scores, scores - _FILTERED_PENALTY)
    return scores


def _scores(logits: Tensor, params: SamplingParams, position: Tensor, ids: Tensor) -> Tensor:
    """Filtered ``logits / T + g`` of one row, float64 ``[V]``."""
    scaled = logits / params.temperature
    scores = scaled + gumbel(params.seed, position, ids)[0]
    if params.filters:
        scores = scores.masked_fill(~_kept(scaled, params, ids), -math.inf)
    return scores


def _kept(scaled: Tensor, params: SamplingParams, ids: Tensor) -> Tensor:
    """Bool ``[V]``: which tokens top-k and then top-p leave; ties are cut at the higher id."""
    by_id = torch.argsort(ids)
    order = by_id[torch.argsort(scaled[by_id], descending=True, stable=True)]
    ranked = scaled[order]
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if params.top_k > 0:
        keep[params.top_k :] = False
    if params.top_p < 1:
        chances = torch.softmax(ranked.masked_fill(~keep, -math.inf), dim=0)
        before = torch.cumsum(chances, dim=0) - chances
        # The most likely token always stays, whatever rounding does to its own sum.
        keep &= before < params.top_p
        keep[0] = True
    return torch.zeros_like(keep).index_copy(0, order, keep)


def _first_largest(scores: Tensor) -> Tensor:
    """The lowest index of each row's largest score, int64 ``[N]``."""
    top = scores.amax(dim=1, keepdim=True)
    bad = torch.nonzero(~torch.isfinite(top[:, 0]))[:, 0].tolist()
    if bad:
        raise SpdError(f"the largest logit of row {bad[0]} is {top[bad[0]].item()}")
    ids = torch.arange(scores.shape[1], device=scores.device)
    return torch.where(scores == top, ids, scores.shape[1]).amin(dim=1)
