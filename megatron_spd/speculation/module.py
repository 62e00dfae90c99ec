"""SpeculationModule: features, decoder layers and head; one set of weights, two ways to run it.

Serving runs rows (`forward_rows`), training runs all moments of a text (`forward_moments`). Both
get their rows from `features` and both end in `logits`; a test holds them equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_spd.attention import masked_attention
from megatron_spd.errors import ConfigError
from megatron_spd.rope import rope_angles
from megatron_spd.speculation.aggregators import build_aggregator
from megatron_spd.speculation.config import ModuleConfig
from megatron_spd.speculation.draft_vocab import check_draft_ids
from megatron_spd.speculation.layers import DecoderLayer, rms_norm
from megatron_spd.speculation.moments import (
    CHUNK_MOMENTS,
    MomentRows,
    deepest_attention,
    moment_attention,
    shift_to_moments,
    valid_rows,
)
from megatron_spd.stage_plan import StagePlan

if TYPE_CHECKING:
    from megatron_spd.kv_rows import KvRows


class DraftHead(nn.Module):
    """Normed hidden [..., H] to draft logits [..., Vd], through a residual MLP if asked."""

    def __init__(self, config: ModuleConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.linear = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.inner = nn.Linear(size, size, bias=False) if config.head == "mlp" else None
        self.outer = nn.Linear(size, size, bias=False) if config.head == "mlp" else None
        if self.outer is not None:
            nn.init.zeros_(self.outer.weight)  # starts as the linear head

    def forward(self, normed: Tensor) -> Tensor:
        """[..., H] to [..., Vd]."""
        if self.inner is not None and self.outer is not None:
            normed = normed + self.outer(F.silu(self.inner(normed)))
        result: Tensor = self.linear(normed)
        return result


class SpeculationModule(nn.Module):
    """Guesses the token after each row.

    Args:
        config: shape and rules.
        plan: the plan whose bounds and taps the config states.
        draft_ids: int64 [Vd], token id of each head row, any order; ids 0..Vd-1 when left out.

    Raises:
        ConfigError: the plan is not the config's, or the ids do not fit.
    """

    final_norm: Tensor
    draft_ids: Tensor

    def __init__(
        self, config: ModuleConfig, plan: StagePlan, draft_ids: Tensor | None = None
    ) -> None:
        super().__init__()
        if (config.bounds, config.taps) != (plan.bounds, plan.taps):
            raise ConfigError(
                f"the module was configured for bounds {config.bounds} and taps {config.taps}, "
                f"the plan has bounds {plan.bounds} and taps {plan.taps}"
            )
        self.config, self.plan = config, plan
        self.aggregator = build_aggregator(config.aggregator, plan, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.head = DraftHead(config)
        self.register_buffer("final_norm", torch.ones(config.hidden_size))
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))
        if draft_ids is not None:
            self.set_draft_ids(draft_ids)

    def set_draft_ids(self, draft_ids: Tensor) -> None:
        """Say which token each head row stands for; weights are not moved.

        Raises:
            ConfigError: a wrong count, a duplicate, or an id outside the vocabulary.
        """
        size, vocab_size = self.config.draft_vocab_size, self.config.vocab_size
        self.draft_ids.copy_(check_draft_ids(draft_ids, size, vocab_size))

    @torch.no_grad()
    def init_from_target(self, lm_head: Tensor, final_norm: Tensor) -> None:
        """Copy the target's output rows of the draft ids, and its final norm.

        Args:
            lm_head: [V, H], the target's output matrix.
            final_norm: [H].

        Raises:
            ConfigError: another shape.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        if tuple(lm_head.shape) != expected or tuple(final_norm.shape) != expected[1:]:
            raise ConfigError(
                f"the output matrix has shape {tuple(lm_head.shape)} and the norm "
                f"{tuple(final_norm.shape)}, expected {expected} and {expected[1:]}"
            )
        self.head.linear.weight.copy_(lm_head[self.draft_ids.to(lm_head.device)])
        self.final_norm.copy_(final_norm)

    def features(self, taps: Tensor, depth: int) -> Tensor:
        """What the module reads of positions that have completed `depth` stages.

        The one function that builds rows, in serving and in training.

        Args:
            taps: [..., T, H] in the order of `plan.taps`; those not known at the depth are ignored.
            depth: 0..n.

        Returns:
            [..., H].
        """
        result: Tensor = self.aggregator(taps, self.plan.type_of(depth))
        return result

    def forward_rows(
        self, features: Tensor, positions: Tensor, visible: Tensor, rows: Tensor, kv: KvRows
    ) -> Tensor:
        """Serving: write the rows' keys and values and attend to what each may see.

        Args:
            features: [N, H].
            positions: int64 [N].
            visible: bool [N, high], each row's own row included.
            rows: int64 [N], KV row of each.
            kv: the module's own pool, `config.num_layers` layers.

        Returns:
            [N, H], before the final norm.
        """
        angles = rope_angles(self.config.rope, self.config.head_dim, positions)
        high = visible.shape[1]
        hidden = features
        for index, layer in enumerate(self._decoders()):
            query, key, value = layer.project(hidden, angles)
            kv.write(index, rows, key, value)
            keys, values = kv.keys[index, :high], kv.values[index, :high]
            attended = masked_attention(query[None], keys[None], values[None], visible[None])
            hidden = layer.finish(hidden, attended[0])
        return hidden

    def forward_moments(
        self,
        taps: Tensor,
        positions: Tensor,
        documents: Tensor,
        fill: Tensor,
        chunk_moments: int = CHUNK_MOMENTS,
    ) -> MomentRows:
        """Training: the rows of every moment of packed texts.

        Args:
            taps: [B, S, T, H] in the order of `plan.taps`.
            positions: int64 [B, S].
            documents: int64 [B, S], -1 for padding.
            fill: int64 [B, S], tokens in flight when the index is the newest, 1..n.
            chunk_moments: moments attended together.
        """
        num_stages = self.plan.num_stages
        by_type = {
            self.plan.type_of(depth): self.features(taps, depth) for depth in range(num_stages + 1)
        }
        deepest = by_type[self.plan.type_of(num_stages)]
        depths = range(num_stages)
        own = torch.stack(
            [shift_to_moments(by_type[self.plan.type_of(d)], d) for d in depths], dim=2
        )
        own_positions = torch.stack([shift_to_moments(positions, d) for d in depths], dim=2)
        rope, dim = self.config.rope, self.config.head_dim
        angles = rope_angles(rope, dim, positions.flatten())
        own_angles = rope_angles(rope, dim, own_positions.flatten())
        for layer in self._decoders():
            query, key, value = layer.project(deepest, angles)
            own_rows = layer.project(own, own_angles)
            near = moment_attention(own_rows, (key, value), documents, fill, chunk_moments)
            own = layer.finish(own, near)
            far = deepest_attention(query, key, value, documents)
            deepest = layer.finish(deepest, far)
        valid = valid_rows(documents, fill, num_stages)
        return MomentRows(hidden=own, valid=valid, deepest=deepest)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [..., H] to [..., Vd] in float32; row r is token draft_ids[r]."""
        normed = rms_norm(hidden, self.final_norm, self.config.norm_eps)
        result: Tensor = self.head(normed)
        return result if result.dtype == torch.float64 else result.float()

    def _decoders(self) -> list[DecoderLayer]:
        """The layers, typed."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
