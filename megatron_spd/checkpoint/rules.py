"""The one table between Hugging Face's tensors and a stage's, used in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_spd.stage_plan import StagePlan
from megatron_spd.target_spec import TargetSpec

Shape = tuple[int, ...]
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One tensor of a stage and the Hugging Face tensors it is made of."""

    ours: str
    """Name in the stage's state dict; of a decoder layer, behind `layers.{local}.`."""
    hf: tuple[str, ...]
    """Names in the folder; of a decoder layer, behind `model.layers.{layer}.`."""
    shapes: Callable[[TargetSpec], tuple[Shape, ...]]
    """Shapes of the Hugging Face tensors, in the order of `hf`."""
    join: Callable[[Sequence[Tensor], TargetSpec], Tensor]
    """Hugging Face to ours."""
    split: Callable[[Tensor, TargetSpec], tuple[Tensor, ...]]
    """Ours to Hugging Face; the exact inverse of `join`."""


def join_qkv(parts: Sequence[Tensor], spec: TargetSpec) -> Tensor:
    """q [heads * D, H], k and v [kv * D, H] -> [(heads + 2 * kv) * D, H], group by kv group."""
    groups = [part.reshape(spec.num_kv_heads, -1, spec.hidden_size) for part in parts]
    return torch.cat(groups, dim=1).reshape(-1, spec.hidden_size)


def split_qkv(tensor: Tensor, spec: TargetSpec) -> tuple[Tensor, ...]:
    """The inverse of `join_qkv`."""
    grouped = tensor.reshape(spec.num_kv_heads, -1, spec.hidden_size)
    queries = grouped.shape[1] - 2 * spec.head_dim
    ends = (queries, queries + spec.head_dim)
    parts = (grouped[:, : ends[0]], grouped[:, ends[0] : ends[1]], grouped[:, ends[1] :])
    return tuple(part.reshape(-1, spec.hidden_size) for part in parts)


def _join_rows(parts: Sequence[Tensor], spec: TargetSpec) -> Tensor:
    return torch.cat(list(parts), dim=0)


def _split_rows(tensor: Tensor, spec: TargetSpec) -> tuple[Tensor, ...]:
    return tuple(tensor.chunk(2, dim=0))


def _same(ours: str, hf: str, shape: Callable[[TargetSpec], Shape]) -> Rule:
    return Rule(
        ours=ours,
        hf=(hf,),
        shapes=lambda spec: (shape(spec),),
        join=lambda parts, spec: parts[0],
        split=lambda tensor, spec: (tensor,),
    )


def _vector(spec: TargetSpec) -> Shape:
    return (spec.hidden_size,)


def _table(spec: TargetSpec) -> Shape:
    return (spec.vocab_size, spec.hidden_size)


def _qkv_shapes(spec: TargetSpec) -> tuple[Shape, ...]:
    key = (spec.num_kv_heads * spec.head_dim, spec.hidden_size)
    return ((spec.num_heads * spec.head_dim, spec.hidden_size), key, key)


LAYER_RULES: tuple[Rule, ...] = (
    _same("input_layernorm.weight", "input_layernorm.weight", _vector),
    Rule(
        ours="self_attention.linear_qkv.weight",
        hf=("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        shapes=_qkv_shapes,
        join=join_qkv,
        split=split_qkv,
    ),
    _same(
        "self_attention.linear_proj.weight",
        "self_attn.o_proj.weight",
        lambda spec: (spec.hidden_size, spec.num_heads * spec.head_dim),
    ),
    _same("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", _vector),
    Rule(
        ours="mlp.linear_fc1.weight",
        hf=("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        shapes=lambda spec: ((spec.intermediate_size, spec.hidden_size),) * 2,
        join=_join_rows,
        split=_split_rows,
    ),
    _same(
        "mlp.linear_fc2.weight",
        "mlp.down_proj.weight",
        lambda spec: (spec.hidden_size, spec.intermediate_size),
    ),
)
EMBEDDING_RULE = _same("embedding.weight", EMBEDDING, _table)
NORM_RULE = _same("final_norm.weight", "model.norm.weight", _vector)
HEAD_RULE = _same("output.weight", HEAD, _table)
TIED_HEAD_RULE = _same("output.weight", EMBEDDING, _table)


def rules_of(
    spec: TargetSpec, plan: StagePlan, stage: int
) -> Iterator[tuple[Rule, str, tuple[str, ...]]]:
    """(rule, our full name, the folder's full names) of each tensor of a stage."""
    if stage == 0:
        yield EMBEDDING_RULE, EMBEDDING_RULE.ours, EMBEDDING_RULE.hf
    for local, layer in enumerate(plan.layers_of(stage)):
        for rule in LAYER_RULES:
            names = tuple(f"model.layers.{layer}.{name}" for name in rule.hf)
            yield rule, f"layers.{local}.{rule.ours}", names
    if stage == plan.num_stages - 1:
        head = TIED_HEAD_RULE if spec.tied else HEAD_RULE
        yield NORM_RULE, NORM_RULE.ours, NORM_RULE.hf
        yield head, head.ours, head.hf


def expected_shapes(spec: TargetSpec) -> dict[str, Shape]:
    """Every tensor a folder of this target must hold, with its shape."""
    plan = StagePlan.even(spec.num_layers, 1)
    found: dict[str, Shape] = {}
    for rule, _, names in rules_of(spec, plan, 0):
        found.update(zip(names, rule.shapes(spec), strict=True))
    return found
