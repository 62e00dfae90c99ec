"""A tiny random Llama, written by transformers itself."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    def make(name: str = "hf", *, shard: str = "1GB", seed: int = 0, **changes: Any) -> Path:
        torch.manual_seed(seed)
        fields: dict[str, Any] = {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "vocab_size": 40,
            "max_position_embeddings": 64,
        }
        model = LlamaForCausalLM(LlamaConfig(**{**fields, **changes}))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        model.save_pretrained(tmp_path / name, max_shard_size=shard)
        return tmp_path / name

    return make


@pytest.fixture
def shared() -> Path:
    default = Path(__file__).resolve().parents[3] / ".." / "shared"
    path = Path(os.environ.get("SPD_SHARED", default))
    if not (path / "models").is_dir():
        pytest.skip(f"no shared models at {path}; set SPD_SHARED")
    return path
