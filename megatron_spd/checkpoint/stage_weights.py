"""Weights between a Hugging Face folder and the stages of a plan, both ways, bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from megatron_spd.checkpoint.atomic import write_atomic
from megatron_spd.checkpoint.hf_folder import INDEX, HfFolder, read_header
from megatron_spd.checkpoint.rules import (
    EMBEDDING,
    EMBEDDING_RULE,
    HEAD,
    HEAD_RULE,
    expected_shapes,
    rules_of,
)
from megatron_spd.errors import CheckpointError
from megatron_spd.stage_plan import StagePlan
from megatron_spd.target_spec import TargetSpec

TIED_HASH = "tied_sha256"
COMPANIONS = (
    "generation_config.json",
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def load_stage(
    folder: HfFolder, plan: StagePlan, stage: int, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The tensors of one stage under the names of its state dict; only these are opened.

    A tied target's last stage gets the embedding as `output.weight`. `dtype` None keeps the stored
    one.

    Raises:
        CheckpointError: the plan is for another number of layers, shares matrices between ranks, or
            has no such stage.
    """
    _check_plan(folder.spec, plan, stage)
    found: dict[str, Tensor] = {}
    for rule, ours, names in rules_of(folder.spec, plan, stage):
        joined = rule.join([folder.read(name) for name in names], folder.spec)
        found[ours] = joined.to(dtype or folder.dtype).contiguous()
    return found


def load_embedding(folder: HfFolder, dtype: torch.dtype | None = None) -> Tensor:
    """The embedding [V, H]: the module's rank holds its own copy."""
    return folder.read(EMBEDDING).to(dtype or folder.dtype)


def load_head(folder: HfFolder, dtype: torch.dtype | None = None) -> Tensor:
    """The output head [V, H]; the embedding when the target is tied."""
    return folder.read(EMBEDDING if folder.spec.tied else HEAD).to(dtype or folder.dtype)


def load_final_norm(folder: HfFolder, dtype: torch.dtype | None = None) -> Tensor:
    """The weight [H] of the target's final norm."""
    return folder.read("model.norm.weight").to(dtype or folder.dtype)


def shard_name(plan: StagePlan, stage: int) -> str:
    """The file of a stage in a folder that `save_stage` writes."""
    return f"model-{stage + 1:05d}-of-{plan.num_stages:05d}.safetensors"


def save_stage(
    path: str | Path, spec: TargetSpec, plan: StagePlan, stage: int, tensors: Mapping[str, Tensor]
) -> Path:
    """Write one stage's tensors, named as its state dict, as a shard with Hugging Face's names.

    Stages may write at the same time, from different ranks; `merge_index` completes the folder.

    Raises:
        CheckpointError: a tensor is missing, unknown or of a wrong shape.
    """
    _check_plan(spec, plan, stage)
    rules = list(rules_of(spec, plan, stage))
    missing = [ours for _, ours, _ in rules if ours not in tensors]
    unknown = sorted(set(tensors) - {ours for _, ours, _ in rules})
    if missing or unknown:
        raise CheckpointError(f"stage {stage}: missing tensors {missing}, unknown {unknown}")
    shapes = expected_shapes(spec)
    metadata = {"format": "pt"}
    out: dict[str, Tensor] = {}
    for rule, ours, names in rules:
        tensor = tensors[ours].detach().cpu()
        if spec.tied and ours in (EMBEDDING_RULE.ours, HEAD_RULE.ours):
            digest = _digest(tensor)
            if metadata.setdefault(TIED_HASH, digest) != digest:
                raise CheckpointError(_untied(f"stage {stage}", f"stage {stage}"))
            if ours == HEAD_RULE.ours:
                continue
        for name, part in zip(names, _split(rule.split, tensor, spec, ours), strict=True):
            if tuple(part.shape) != shapes[name]:
                raise CheckpointError(
                    f"{ours}: {name} should be {shapes[name]}, found {tuple(part.shape)}"
                )
            out[name] = part.contiguous().clone()
    file = Path(path) / shard_name(plan, stage)
    write_atomic(file, save(out, metadata=metadata))
    return file


def merge_index(
    path: str | Path, spec: TargetSpec, plan: StagePlan, *, source: HfFolder | None = None
) -> HfFolder:
    """Complete a folder whose stages were all saved: config, tokenizer, then the index.

    `source` gives the config's other fields and the tokenizer. The folder is opened, and so
    checked, before it is returned.

    Raises:
        CheckpointError: a stage's shard is missing or damaged, or the two ends of a tied target
            disagree.
    """
    root = Path(path)
    placed: dict[str, str] = {}
    total, tied = 0, {}
    for stage in range(plan.num_stages):
        file = root / shard_name(plan, stage)
        for name, entry in read_header(file).items():
            placed[name] = file.name
            total += entry.end - entry.start
        with safe_open(file, framework="pt") as shard:
            digest = (shard.metadata() or {}).get(TIED_HASH)
        if digest:
            tied[file.name] = digest
    if len(set(tied.values())) > 1:
        raise CheckpointError(_untied(*list(tied)[:2]))
    lost = sorted(set(expected_shapes(spec)) - set(placed))
    if lost:
        raise CheckpointError(f"{root}: no stage wrote {', '.join(lost[:5])} ({len(lost)} missing)")
    config: dict[str, Any] = {**(source.config if source else {}), **spec.to_hf()}
    for old in ("torch_dtype", "rope_theta", "rope_scaling"):
        config.pop(old, None)
    write_atomic(root / "config.json", _json(config))
    for name in COMPANIONS:
        if source and (source.path / name).exists():
            write_atomic(root / name, (source.path / name).read_bytes())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    write_atomic(root / INDEX, _json(index))
    return HfFolder(root)


def _check_plan(spec: TargetSpec, plan: StagePlan, stage: int) -> None:
    if plan.num_layers != spec.num_layers:
        raise CheckpointError(
            f"the plan is for {plan.num_layers} layers, the target has {spec.num_layers}"
        )
    if not 0 <= stage < plan.num_stages:
        raise CheckpointError(f"stage {stage} is not one of the plan's {plan.num_stages}")
    if plan.tensor_parallel_size != 1:
        raise CheckpointError(
            f"tensor_parallel_size {plan.tensor_parallel_size} is not supported here, only 1"
        )


def _split(split: Any, tensor: Tensor, spec: TargetSpec, ours: str) -> tuple[Tensor, ...]:
    try:
        parts: tuple[Tensor, ...] = split(tensor, spec)
    except RuntimeError as error:
        raise CheckpointError(f"{ours} has the wrong shape {tuple(tensor.shape)}") from error
    return parts


def _digest(tensor: Tensor) -> str:
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()


def _untied(first: str, last: str) -> str:
    return (
        f"the target is tied, but the embedding of {first} and the output head of {last} differ; "
        "save them with tied = False or keep them equal while training"
    )


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
