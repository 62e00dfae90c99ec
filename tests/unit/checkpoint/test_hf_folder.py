"""A folder is judged from its headers, before weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_spd.checkpoint import HfFolder
from megatron_spd.errors import CheckpointError, ConfigError


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def rewrite(path: Path, **changes: torch.Tensor) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors.update(changes)
    save_file(tensors, path / "model.safetensors")


def test_truncated_file_names_both_sizes(make_folder: Any) -> None:
    path = make_folder()
    file = path / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=rf"expected {size} bytes.*found {size - 7}") as error:
        HfFolder(path)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("kept", [0, 5, 100])
def test_file_cut_inside_its_header(make_folder: Any, kept: int) -> None:
    path = make_folder()
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=f"found {kept} bytes"):
        HfFolder(path)


def test_missing_files(make_folder: Any, tmp_path: Path) -> None:
    path = make_folder(shard="20KB")
    shard = sorted(path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        HfFolder(path)
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        HfFolder(path)
    with pytest.raises(CheckpointError, match="not a folder"):
        HfFolder(tmp_path / "nowhere")


def test_tensors_are_all_accounted_for(make_folder: Any) -> None:
    path = make_folder()
    rewrite(path, stray=torch.ones(2))
    with pytest.raises(CheckpointError, match="stray belongs to no part"):
        HfFolder(path)


def test_shape_and_missing_layer(make_folder: Any) -> None:
    path = make_folder()
    edit_config(path, num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\S+ is missing"):
        HfFolder(path)
    edit_config(path, num_hidden_layers=3, vocab_size=41)
    with pytest.raises(CheckpointError, match=r"should be \(41, 32\), found \(40, 32\)"):
        HfFolder(path)


def test_unknown_architecture_is_refused_before_weights(make_folder: Any) -> None:
    path = make_folder()
    (path / "model.safetensors").unlink()
    edit_config(path, architectures=["GPT9ForCausalLM"])
    with pytest.raises(ConfigError, match="GPT9ForCausalLM"):
        HfFolder(path)


def test_stored_dtype_wins_and_mixed_is_refused(make_folder: Any) -> None:
    path = make_folder()
    edit_config(path, dtype="bfloat16")
    assert (HfFolder(path).dtype, HfFolder(path).spec.dtype) == (torch.float32, "float32")
    rewrite(path, **{"model.norm.weight": torch.ones(32, dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match="BF16, F32"):
        HfFolder(path)


def test_weights_hash_ignores_shards_and_sees_values(make_folder: Any) -> None:
    one = HfFolder(make_folder("one")).weights_hash()
    assert HfFolder(make_folder("many", shard="20KB")).weights_hash() == one
    assert HfFolder(make_folder("other", seed=1)).weights_hash() != one
    path = make_folder("one")
    rewrite(path, **{"model.norm.weight": torch.zeros(32)})
    assert HfFolder(path).weights_hash() != one


def test_real_target(shared: Path) -> None:
    folder = HfFolder(shared / "models" / "py-llama-16l")
    assert (folder.spec.num_layers, folder.dtype) == (16, torch.bfloat16)
    assert len(folder.tokenizer_hash()) == 16


def test_weights_hash_sees_a_byte_in_the_middle(make_folder: Any) -> None:
    path = make_folder("changed")
    before = HfFolder(path).weights_hash()
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    start, end = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])[
        "model.embed_tokens.weight"
    ]["data_offsets"]
    data[8 + int.from_bytes(data[:8], "little") + (start + end) // 2] ^= 1
    file.write_bytes(data)
    assert HfFolder(path).weights_hash() != before
