"""The module's artifact: what goes in comes out, and what does not fit is refused unloaded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spd.checkpoint import (
    ArtifactMeta,
    FolderHashes,
    HfFolder,
    artifact,
    check_pairing,
    load_artifact,
    save_artifact,
)
from megatron_spd.errors import CheckpointError
from megatron_spd.stage_plan import StagePlan

PLAN = StagePlan.even(3, 3)
IDS = (7, 3, 39)


@pytest.fixture
def folder(make_folder: Any) -> HfFolder:
    return HfFolder(make_folder())


@pytest.fixture
def meta(folder: HfFolder) -> ArtifactMeta:
    return ArtifactMeta.of(folder, PLAN, module={"draft_vocab_size": 3}, draft_ids=IDS)


@pytest.fixture
def saved(meta: ArtifactMeta, tmp_path: Path) -> Path:
    tensors = {"draft_ids": torch.tensor(IDS), "head.weight": torch.randn(3, 4)}
    save_artifact(tmp_path / "module", meta, tensors)
    return tmp_path / "module"


def test_round_trip(saved: Path, meta: ArtifactMeta, folder: HfFolder) -> None:
    loaded, tensors = load_artifact(saved, target=folder, plan=PLAN)
    assert loaded == meta and loaded.stage_plan == PLAN
    assert tensors["draft_ids"].tolist() == list(IDS) and tensors["head.weight"].shape == (3, 4)
    assert sorted(file.name for file in saved.iterdir()) == ["module.json", "module.safetensors"]


@pytest.mark.parametrize(
    ("ids", "word"),
    [((1, 1, 2), "repeat"), ((1, 2, 40), "outside"), ((-1, 2, 3), "outside"), ((), "missing")],
)
def test_draft_ids_are_checked(folder: HfFolder, ids: tuple[int, ...], word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        ArtifactMeta.of(folder, PLAN, module={}, draft_ids=ids)


def test_counts_must_agree(folder: HfFolder, meta: ArtifactMeta, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="draft_vocab_size is 4"):
        ArtifactMeta.of(folder, PLAN, module={"draft_vocab_size": 4}, draft_ids=IDS)
    with pytest.raises(CheckpointError, match="in order"):
        save_artifact(tmp_path / "x", meta, {"draft_ids": torch.tensor([3, 7, 39])})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"format_version": 2}, "format_version is 2"),
        ({"draft_ids": None}, "list of token ids"),
        ({"draft_ids": [7, 7, 3]}, "repeat"),
        ({"draft_ids": [3, 7, 39]}, "do not belong together"),
        ({"surprise": 1}, "surprise"),
        ({"plan": "{}"}, "plan"),
        ({"target": 3}, "wrong kind"),
    ],
)
def test_edited_facts(saved: Path, changes: dict[str, Any], word: str) -> None:
    values = json.loads((saved / "module.json").read_text())
    (saved / "module.json").write_text(json.dumps({**values, **changes}))
    with pytest.raises(CheckpointError, match=word):
        load_artifact(saved)


def test_missing_and_truncated(saved: Path) -> None:
    file = saved / "module.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        load_artifact(saved)
    file.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        load_artifact(saved)


def test_another_target_is_refused_before_weights(
    saved: Path, make_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact, "load_file", lambda path: pytest.fail("weights were loaded"))
    other = HfFolder(make_folder("other", seed=1))
    with pytest.raises(CheckpointError, match=f"weights_hash.*{other.weights_hash()}"):
        load_artifact(saved, target=other, plan=PLAN)


@pytest.mark.parametrize(
    ("spec_change", "words"),
    [
        ({"vocab_size": 41}, ("vocab_size", "40", "41")),
        ({"hidden_size": 64}, ("hidden_size", "32", "64")),
        ({"dtype": "bfloat16"}, ("dtype", "float32", "bfloat16")),
        ({"norm_eps": 0.5}, ("norm_eps", "0.5")),
    ],
)
def test_pairing_names_both_values(
    meta: ArtifactMeta, folder: HfFolder, spec_change: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_pairing(meta, replace(folder.spec, **spec_change), folder.hashes(), PLAN)
    assert all(word in str(caught.value) for word in words)


def test_pairing_of_tokenizer_and_plan(meta: ArtifactMeta, folder: HfFolder) -> None:
    spec, hashes = folder.spec, folder.hashes()
    with pytest.raises(CheckpointError, match="tokenizer_hash"):
        check_pairing(meta, spec, FolderHashes(weights=hashes.weights, tokenizer="ff"), PLAN)
    with pytest.raises(CheckpointError, match=r"lacking \[1\]"):
        check_pairing(meta, spec, hashes, StagePlan.from_bounds((0, 2, 3)))
    with pytest.raises(CheckpointError, match="was trained over bounds"):
        moved = StagePlan.from_bounds((0, 2, 3), taps=PLAN.taps)
        check_pairing(meta, spec, hashes, moved)
    check_pairing(meta, spec, hashes, StagePlan.even(3, 3, module_own_rank=True))
