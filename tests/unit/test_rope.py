"""RoPE against transformers' own, for both types."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron_spd.rope import apply_rope, inverse_frequencies, rope_angles
from megatron_spd.target_spec import RopeSpec

PLAIN = RopeSpec(rope_type="default", theta=10000.0)
LLAMA3 = RopeSpec(
    rope_type="llama3",
    theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def theirs(rope: RopeSpec, head_dim: int) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=16384,
        rope_parameters=rope.to_hf(),
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("rope", [PLAIN, LLAMA3], ids=["default", "llama3"])
def test_inverse_frequencies_match_transformers(rope: RopeSpec) -> None:
    torch.testing.assert_close(
        inverse_frequencies(rope, 128), theirs(rope, 128).inv_freq, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("rope", [PLAIN, LLAMA3], ids=["default", "llama3"])
def test_rotation_matches_transformers(rope: RopeSpec) -> None:
    positions = torch.tensor([0, 7, 3, 200])
    x = torch.randn(4, 2, 16)
    ours = apply_rope(x, rope_angles(rope, 16, positions))
    cos, sin = theirs(rope, 16)(x, positions.unsqueeze(0))
    want, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(ours, want[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_angles_repeat_the_half() -> None:
    angles = rope_angles(PLAIN, 8, torch.tensor([5]))
    assert angles.shape == (1, 8)
    assert torch.equal(angles[:, :4], angles[:, 4:])
