"""Masked attention is softmax over the visible keys, head groups sharing theirs."""

import torch

from megatron_spd.attention import masked_attention


def test_it_is_softmax_over_what_is_visible() -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 3, 4, 8)
    key, value = torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    visible = torch.rand(2, 3, 5) < 0.5
    visible[:, :, 0] = True
    found = masked_attention(query, key, value, visible)
    for batch in range(2):
        for row in range(3):
            for head in range(4):
                keys = key[batch, visible[batch, row], head // 2]
                weights = (keys @ query[batch, row, head] / 8**0.5).softmax(0)
                expected = weights @ value[batch, visible[batch, row], head // 2]
                torch.testing.assert_close(found[batch, row, head], expected)
