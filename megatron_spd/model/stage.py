"""TargetStage: the target's layers [lo, hi) on Megatron-core's transformer layers."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from megatron_spd.errors import PlanError
from megatron_spd.kv_rows import KvRows
from megatron_spd.model.attention import RowAttention, RowsView, TextView
from megatron_spd.rope import rope_angles
from megatron_spd.stage_plan import StagePlan
from megatron_spd.target_spec import TargetSpec


@dataclass(frozen=True, kw_only=True)
class StageOutput:
    """What leaves a stage."""

    hidden: Tensor
    """Hidden state after the stage's last layer, un-normed; the shape of the input."""
    taps: tuple[Tensor, ...]
    """The boundaries of `plan.taps_of(stage)`, ascending, each of the input's shape."""


class TargetStage(MegatronModule):
    """One stage of the target; the first has the embedding, the last the final norm and output.

    Needs Megatron's parallel state (`model.parallel.init_single_rank`). Weights are random until
    loaded. With `trainable=False` no parameter takes a gradient. A tied target on one stage shares
    the embedding; on several, the last stage's output is a copy that its owner must keep equal.

    Raises:
        PlanError: the plan is not for this target, or wants tensor parallelism.
    """

    def __init__(
        self,
        spec: TargetSpec,
        plan: StagePlan,
        stage: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        trainable: bool = False,
        initialize: bool = True,
    ) -> None:
        if plan.num_layers != spec.num_layers:
            raise PlanError(f"plan of {plan.num_layers} layers, target of {spec.num_layers}")
        if plan.tensor_parallel_size != 1:
            raise PlanError("tensor_parallel_size must be 1: the stages are not sharded")
        super().__init__(config=_layer_config(spec, dtype, initialize))
        self.spec, self.plan, self.stage = spec, plan, stage
        self.trainable = trainable
        self.is_first, self.is_last = stage == 0, stage == plan.num_stages - 1
        layer_spec = deepcopy(get_gpt_layer_local_spec(normalization="RMSNorm"))
        layer_spec.submodules.self_attention.submodules.core_attention = RowAttention
        self.layers = nn.ModuleList(
            build_module(layer_spec, config=self.config, layer_number=layer + 1)
            for layer in plan.layers_of(stage)
        )
        for local, layer in enumerate(self.layers):
            _core(layer).local_layer = local
        if self.is_first:
            self.embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
            nn.init.normal_(self.embedding.weight, std=0.02)
        if self.is_last:
            self.final_norm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_eps)
            self.output = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
            nn.init.normal_(self.output.weight, std=0.02)
            if self.is_first and spec.tied:
                self.output.weight = self.embedding.weight
        self.to(device=device, dtype=dtype)
        self.requires_grad_(trainable)
        self.register_state_dict_post_hook(_drop_extra_state)
        self.register_load_state_dict_post_hook(_forgive_extra_state)

    def embed(self, tokens: Tensor) -> Tensor:
        """Boundary 0 of int64 `tokens` [..]: [.., H]. First stage only."""
        embedded: Tensor = self.embedding(tokens)
        return embedded

    def forward_rows(
        self, hidden: Tensor, positions: Tensor, rows: Tensor, visible: Tensor, kv: KvRows
    ) -> StageOutput:
        """Forward a wave: `hidden` [N, H], `positions` and `rows` [N], `visible` [N, high].

        Writes each layer's keys and values to `rows` of `kv`, which has this stage's layers only.
        """
        angles = rope_angles(self.spec.rope, self.spec.head_dim, positions)
        view = RowsView(angles=angles, rows=rows, visible=visible, kv=kv)
        out, taps = self._run(hidden.unsqueeze(1), view)
        return StageOutput(hidden=out.squeeze(1), taps=tuple(tap.squeeze(1) for tap in taps))

    def forward_text(self, hidden: Tensor, positions: Tensor, documents: Tensor) -> StageOutput:
        """Forward whole texts: `hidden` [B, S, H], `positions` and `documents` [B, S].

        A token attends to the tokens of its document up to itself; document -1 is padding, which
        nobody else sees.
        """
        length = documents.shape[1]
        same = documents.unsqueeze(2) == documents.unsqueeze(1)
        same &= (documents >= 0).unsqueeze(1)
        causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
        own = torch.eye(length, dtype=torch.bool, device=documents.device)
        flat = positions.transpose(0, 1).reshape(-1)
        angles = rope_angles(self.spec.rope, self.spec.head_dim, flat)
        angles = angles.view(length, -1, self.spec.head_dim)
        view = TextView(angles=angles, visible=(same & causal) | own)
        out, taps = self._run(hidden.transpose(0, 1), view)
        return StageOutput(
            hidden=out.transpose(0, 1), taps=tuple(tap.transpose(0, 1) for tap in taps)
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output of boundary L `hidden` [.., H]: float32 [.., V]. Last only."""
        scores: Tensor = self.output(self.final_norm(hidden))
        return scores.float()

    def _run(self, hidden: Tensor, view: RowsView | TextView) -> tuple[Tensor, list[Tensor]]:
        """The layers over [S, B, H], collecting the stage's taps."""
        wanted = self.plan.taps_of(self.stage)
        taps: list[Tensor] = []
        for index, layer in zip(self.plan.layers_of(self.stage), self.layers, strict=True):
            core = _core(layer)
            core.view = view
            try:
                hidden, _ = layer(hidden, attention_mask=None)
            finally:
                core.view = None
            if index + 1 in wanted:
                taps.append(hidden)
        return hidden, taps


def _core(layer: Any) -> RowAttention:
    core = layer.self_attention.core_attention
    assert isinstance(core, RowAttention)
    return core


def _layer_config(spec: TargetSpec, dtype: torch.dtype, initialize: bool) -> TransformerConfig:
    """Megatron's description of one layer; its pipeline size stays 1, so numbers are ours."""
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
        perform_initialization=initialize,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )


def _drop_extra_state(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Megatron's linears save an empty `_extra_state`; a stage's file holds tensors only."""
    for name in [name for name in state if name.endswith("_extra_state")]:
        del state[name]


def _forgive_extra_state(module: nn.Module, incompatible: Any) -> None:
    """The way back of `_drop_extra_state`: its keys are not missed."""
    missing = incompatible.missing_keys
    missing[:] = [name for name in missing if not name.endswith("_extra_state")]
