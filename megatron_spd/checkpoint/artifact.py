"""The speculation module on disk: module.safetensors, and module.json that says what it fits.

The facts are also inside module.safetensors, so that the two files cannot be mixed up unseen.
Everything that can be refused is refused from the facts, before a weight is loaded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from megatron_spd.checkpoint.atomic import write_all_atomic
from megatron_spd.checkpoint.hf_folder import FolderHashes, HfFolder, read_header, read_json
from megatron_spd.errors import CheckpointError, PlanError, listing
from megatron_spd.stage_plan import StagePlan
from megatron_spd.target_spec import TargetSpec

FORMAT_VERSION = 1
FACTS, TENSORS = "module.json", "module.safetensors"
TARGET_FIELDS = ("weights_hash", "dtype", "hidden_size", "num_layers", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class ArtifactMeta:
    """What a module is and which target it was trained for.

    Raises:
        CheckpointError: one message with a bullet for each problem found.
    """

    plan: str
    """The StagePlan it was trained over, as JSON."""
    module: Mapping[str, Any]
    """The module's own configuration."""
    draft_ids: tuple[int, ...]
    """Token id of each row of the draft head, in row order."""
    rope: Mapping[str, Any]
    """Rope of its layers, as Hugging Face's `rope_parameters`."""
    norm_eps: float
    """Epsilon of its norms."""
    target: Mapping[str, Any]
    """weights_hash, dtype, hidden_size, num_layers and vocab_size of the target."""
    tokenizer_hash: str
    """Of the target's tokenizer; empty when it had none."""
    format_version: int = FORMAT_VERSION
    """Version of this layout."""

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise CheckpointError(listing("the module's facts are wrong", problems))

    @classmethod
    def of(
        cls,
        folder: HfFolder,
        plan: StagePlan,
        *,
        module: Mapping[str, Any],
        draft_ids: Sequence[int],
    ) -> ArtifactMeta:
        """The facts of a module trained for this folder over this plan."""
        spec = folder.spec
        return cls(
            plan=plan.to_json(),
            module=dict(module),
            draft_ids=tuple(int(token) for token in draft_ids),
            rope=spec.rope.to_hf(),
            norm_eps=spec.norm_eps,
            target={
                "weights_hash": folder.weights_hash(),
                **{name: getattr(spec, name) for name in TARGET_FIELDS[1:]},
            },
            tokenizer_hash=folder.tokenizer_hash(),
        )

    @property
    def stage_plan(self) -> StagePlan:
        """The plan it was trained over."""
        return StagePlan.from_json(self.plan)

    def to_json(self) -> str:
        """Sorted keys; the same facts give the same bytes."""
        return json.dumps(asdict(self), sort_keys=True, indent=1) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ArtifactMeta:
        """The facts in a parsed module.json.

        Raises:
            CheckpointError: another format version, missing or unknown fields, wrong facts.
        """
        version = values.get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"format_version is {version}, this program reads {FORMAT_VERSION}; export it again"
            )
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            raise CheckpointError(
                f"module.json: missing fields {sorted(names - set(values))}, "
                f"unknown {sorted(set(values) - names)}"
            )
        if not isinstance(values["draft_ids"], list):
            raise CheckpointError("module.json: draft_ids must be a list of token ids")
        try:
            return cls(**{**values, "draft_ids": tuple(values["draft_ids"])})
        except (TypeError, AttributeError) as error:
            raise CheckpointError(f"module.json: a field has the wrong kind: {error}") from error


def save_artifact(folder: str | Path, meta: ArtifactMeta, tensors: Mapping[str, Tensor]) -> None:
    """Write both files; a reader sees neither in part.

    Raises:
        CheckpointError: the tensors' own draft_ids are not those of the facts.
    """
    _check_draft_tensor(meta, tensors)
    out = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = meta.to_json()
    root = Path(folder)
    write_all_atomic(
        {root / TENSORS: save(out, metadata={"facts": text}), root / FACTS: text.encode()}
    )


def load_meta(folder: str | Path) -> ArtifactMeta:
    """The facts alone, after checking both files' sizes and that they belong together.

    Raises:
        CheckpointError: a file is missing or damaged, or the facts are wrong.
    """
    root = Path(folder)
    values = read_json(root / FACTS)
    try:
        meta = ArtifactMeta.from_dict(values)
    except CheckpointError as error:
        raise CheckpointError(f"{root / FACTS}: {error}") from error
    read_header(root / TENSORS)
    with safe_open(root / TENSORS, framework="pt") as file:
        inside = (file.metadata() or {}).get("facts")
    if inside != meta.to_json():
        raise CheckpointError(
            f"{root / FACTS} and {root / TENSORS} do not belong together: their facts differ; "
            "copy both files of one artifact"
        )
    return meta


def load_artifact(
    folder: str | Path,
    *,
    target: HfFolder | None = None,
    plan: StagePlan | None = None,
) -> tuple[ArtifactMeta, dict[str, Tensor]]:
    """The facts and the tensors. With a target and a plan, refuses a wrong pairing before loading.

    Raises:
        CheckpointError: a damaged artifact, or one that does not fit the target or the plan.
    """
    meta = load_meta(folder)
    if target is not None:
        check_pairing(meta, target.spec, target.hashes(), plan or meta.stage_plan)
    tensors = load_file(Path(folder) / TENSORS)
    _check_draft_tensor(meta, tensors)
    return meta, tensors


def check_pairing(
    meta: ArtifactMeta, spec: TargetSpec, hashes: FolderHashes, plan: StagePlan
) -> None:
    """Refuse a module that was made for another target, tokenizer or plan.

    Raises:
        CheckpointError: a bullet for each difference, naming both values.
    """
    trained = meta.stage_plan
    pairs: list[tuple[str, Any, Any]] = [
        (name, meta.target[name], getattr(spec, name)) for name in TARGET_FIELDS[1:]
    ]
    pairs += [
        ("weights_hash", meta.target["weights_hash"], hashes.weights),
        ("tokenizer_hash", meta.tokenizer_hash, hashes.tokenizer),
        ("rope", dict(meta.rope), spec.rope.to_hf()),
        ("norm_eps", meta.norm_eps, spec.norm_eps),
    ]
    problems = [
        f"{name}: the module has {ours!r}, the target {theirs!r}"
        for name, ours, theirs in pairs
        if ours != theirs
    ]
    lost = [tap for tap in trained.taps if tap not in plan.taps]
    if lost:
        problems.append(
            f"taps: the module reads {trained.taps}, the plan gives {plan.taps}; lacking {lost}"
        )
    elif (trained.bounds, trained.taps) != (plan.bounds, plan.taps):
        problems.append(
            f"plan: the module was trained over bounds {trained.bounds} with taps {trained.taps}, "
            f"the plan has bounds {plan.bounds} with taps {plan.taps}"
        )
    if problems:
        raise CheckpointError(listing("the module does not fit this target", problems))


def _problems(meta: ArtifactMeta) -> list[str]:
    """What is wrong with the facts in themselves."""
    missing = [name for name in TARGET_FIELDS if name not in meta.target]
    if missing:
        return [f"target lacks {', '.join(missing)}"]
    found: list[str] = []
    ids, vocab = meta.draft_ids, meta.target["vocab_size"]
    if not ids or not all(isinstance(token, int) for token in ids):
        return ["draft_ids are missing, or are not all integers"]
    repeated = sorted(token for token, times in Counter(ids).items() if times > 1)
    if repeated:
        found.append(f"draft_ids repeat {repeated[:5]}")
    outside = [token for token in ids if not 0 <= token < vocab]
    if outside:
        found.append(f"draft_ids {outside[:5]} are outside the target's {vocab} tokens")
    rows = meta.module.get("draft_vocab_size", len(ids))
    if rows != len(ids):
        found.append(f"draft_vocab_size is {rows}, but there are {len(ids)} draft_ids")
    hidden = meta.module.get("hidden_size", meta.target["hidden_size"])
    if hidden != meta.target["hidden_size"]:
        found.append(f"hidden_size is {hidden}, the target's {meta.target['hidden_size']}")
    try:
        layers = meta.stage_plan.num_layers
        if layers != meta.target["num_layers"]:
            found.append(f"plan has {layers} layers, the target {meta.target['num_layers']}")
    except (PlanError, ValueError) as error:
        found.append(f"plan: {error}")
    return found


def _check_draft_tensor(meta: ArtifactMeta, tensors: Mapping[str, Tensor]) -> None:
    held = tensors.get("draft_ids")
    if held is not None and held.tolist() != list(meta.draft_ids):
        raise CheckpointError(
            f"the tensors hold {held.numel()} draft_ids that are not the {len(meta.draft_ids)} "
            "of the facts, in order"
        )
