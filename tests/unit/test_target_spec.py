"""What a config.json becomes, and what is refused by name."""

from typing import Any

import pytest

from megatron_spd.errors import ConfigError
from megatron_spd.target_spec import RopeSpec, TargetSpec

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 50,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        "rope_theta": 500000.0,
    }
    return {**base, **changes}


def test_reads_old_style_fields() -> None:
    spec = TargetSpec.from_hf(config(rope_scaling=LLAMA3))
    assert (spec.head_dim, spec.num_kv_heads, spec.dtype) == (8, 2, "bfloat16")
    assert spec.rope == RopeSpec(
        rope_type="llama3",
        theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


def test_new_style_rope_parameters_win() -> None:
    spec = TargetSpec.from_hf(config(rope_parameters={**LLAMA3, "rope_theta": 7.0}))
    assert (spec.rope.rope_type, spec.rope.theta) == ("llama3", 7.0)


def test_end_tokens_are_the_union() -> None:
    spec = TargetSpec.from_hf(config(), {"eos_token_id": [9, 2, 7]})
    assert spec.eos_ids == (2, 7, 9)
    assert TargetSpec.from_hf(config(eos_token_id=None)).eos_ids == ()


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": LLAMA3}, {"tie_word_embeddings": True}])
def test_round_trip(changes: dict[str, Any]) -> None:
    spec = TargetSpec.from_hf(config(**changes), {"eos_token_id": [2, 3]})
    assert TargetSpec.from_hf(spec.to_hf()) == spec


def test_missing_kv_heads_means_one_for_each_head() -> None:
    assert TargetSpec.from_hf(config(num_key_value_heads=None)).num_kv_heads == 8


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": []}, "none named"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"torch_dtype": "float8"}, "float8"),
        ({"head_dim": 7}, "head_dim"),
    ],
)
def test_refuses_by_name(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        TargetSpec.from_hf(config(**changes))


def test_one_message_has_every_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        TargetSpec.from_hf(config(hidden_act="gelu", mlp_bias=True))
    assert str(caught.value).count("\n- ") == 2
