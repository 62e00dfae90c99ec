"""Hugging Face to stages and back, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from megatron_spd.checkpoint import HfFolder, load_head, load_stage, merge_index, save_stage
from megatron_spd.errors import CheckpointError
from megatron_spd.stage_plan import StagePlan


def stages_of(folder: HfFolder, plan: StagePlan) -> list[dict[str, torch.Tensor]]:
    return [load_stage(folder, plan, stage) for stage in range(plan.num_stages)]


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("bounds", [(0, 3), (0, 1, 3), (0, 1, 2, 3)])
def test_round_trip_is_bitwise(
    make_folder: Any, tmp_path: Path, shard: str, tied: bool, kv_heads: int, bounds: tuple[int, ...]
) -> None:
    path = make_folder(shard=shard, tie_word_embeddings=tied, num_key_value_heads=kv_heads)
    folder, plan = HfFolder(path), StagePlan.from_bounds(bounds)
    assert ((path / "model.safetensors.index.json").exists()) == (shard == "20KB")
    for stage, tensors in enumerate(stages_of(folder, plan)):
        save_stage(tmp_path / "back", folder.spec, plan, stage, tensors)
    back = merge_index(tmp_path / "back", folder.spec, plan, source=folder)
    assert back.tensor_names == folder.tensor_names
    assert all(torch.equal(back.read(name), folder.read(name)) for name in folder.tensor_names)
    assert back.spec == folder.spec and back.weights_hash() == folder.weights_hash()
    assert not list((tmp_path / "back").glob(".*"))


def test_transformers_reads_the_way_back(make_folder: Any, tmp_path: Path) -> None:
    path = make_folder(tie_word_embeddings=True)
    folder, plan = HfFolder(path), StagePlan.even(3, 2)
    for stage, tensors in enumerate(stages_of(folder, plan)):
        save_stage(tmp_path / "back", folder.spec, plan, stage, tensors)
    merge_index(tmp_path / "back", folder.spec, plan)
    tokens = torch.tensor([[1, 5, 9]])
    first = LlamaForCausalLM.from_pretrained(path)(tokens).logits
    assert torch.equal(first, LlamaForCausalLM.from_pretrained(tmp_path / "back")(tokens).logits)


def test_qkv_goes_group_by_group(make_folder: Any) -> None:
    folder = HfFolder(make_folder())
    qkv = load_stage(folder, StagePlan.even(3, 3), 1)["layers.0.self_attention.linear_qkv.weight"]
    q, k, v = (folder.read(f"model.layers.1.self_attn.{name}_proj.weight") for name in "qkv")
    assert torch.equal(qkv, torch.cat([q[:16], k[:4], v[:4], q[16:], k[4:], v[4:]]))


def test_names_of_the_ends(make_folder: Any) -> None:
    folder, plan = HfFolder(make_folder(tie_word_embeddings=True)), StagePlan.even(3, 3)
    first, middle, last = stages_of(folder, plan)
    assert "embedding.weight" in first and "output.weight" not in first
    assert len(middle) == 6 and all(name.startswith("layers.0.") for name in middle)
    assert torch.equal(last["output.weight"], first["embedding.weight"])
    assert torch.equal(load_head(folder), last["output.weight"])


def test_only_the_stage_is_opened(make_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, opened = HfFolder(make_folder()), list[str]()
    read = folder.read
    monkeypatch.setattr(folder, "read", lambda name: opened.append(name) or read(name))
    load_stage(folder, StagePlan.even(3, 3), 1)
    assert len(opened) == 9 and all(name.startswith("model.layers.1.") for name in opened)


def test_dtype_is_converted(make_folder: Any) -> None:
    tensors = load_stage(HfFolder(make_folder()), StagePlan.even(3, 1), 0, torch.bfloat16)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_refusals(make_folder: Any, tmp_path: Path) -> None:
    folder, plan = HfFolder(make_folder()), StagePlan.even(3, 2)
    with pytest.raises(CheckpointError, match="4 layers, the target has 3"):
        load_stage(folder, StagePlan.even(4, 2), 0)
    with pytest.raises(CheckpointError, match="stage 2"):
        load_stage(folder, plan, 2)
    tensors = load_stage(folder, plan, 0)
    with pytest.raises(CheckpointError, match=r"unknown \['extra'\]"):
        save_stage(tmp_path / "back", folder.spec, plan, 0, {**tensors, "extra": torch.ones(1)})
    with pytest.raises(CheckpointError, match="linear_qkv"):
        qkv = "layers.0.self_attention.linear_qkv.weight"
        save_stage(tmp_path / "back", folder.spec, plan, 0, {**tensors, qkv: torch.ones(3, 3)})
    save_stage(tmp_path / "back", folder.spec, plan, 0, tensors)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors is missing"):
        merge_index(tmp_path / "back", folder.spec, plan)


def test_tied_ends_that_differ_are_refused(make_folder: Any, tmp_path: Path) -> None:
    folder, plan = HfFolder(make_folder(tie_word_embeddings=True)), StagePlan.even(3, 2)
    first, last = stages_of(folder, plan)
    save_stage(tmp_path / "back", folder.spec, plan, 0, first)
    last["output.weight"] = last["output.weight"] + 1
    save_stage(tmp_path / "back", folder.spec, plan, 1, last)
    with pytest.raises(CheckpointError, match="tied"):
        merge_index(tmp_path / "back", folder.spec, plan)


def test_llama3_rope_survives(make_folder: Any, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    folder, plan = HfFolder(make_folder(rope_parameters=rope)), StagePlan.even(3, 1)
    assert folder.spec.rope.to_hf() == rope
    save_stage(tmp_path / "back", folder.spec, plan, 0, load_stage(folder, plan, 0))
    back = merge_index(tmp_path / "back", folder.spec, plan)
    assert back.spec == folder.spec
    assert set(load_file(tmp_path / "back" / "model-00001-of-00001.safetensors")) == set(
        back.tensor_names
    )
