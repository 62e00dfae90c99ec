"""The last stage chooses with the noise of the position it chooses for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from megatron_spd.inference.stage_worker import TargetCompute
from megatron_spd.kv_rows import KvRows
from megatron_spd.model.stage import TargetStage
from megatron_spd.sampling import SamplingParams, candidates, gumbel
from megatron_spd.wave import WaveHeader

VOCAB = 40
LOGITS = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))


def step(positions: tuple[int, ...], params: SamplingParams) -> list[int]:
    """What is chosen behind nodes whose logits are the rows of LOGITS."""
    count = len(positions)
    kv = KvRows(1, 8, 1, 2, torch.float32, "cpu")
    model = SimpleNamespace(
        embed=lambda tokens: torch.zeros(len(tokens), 4),
        forward_rows=lambda hidden, *_: SimpleNamespace(hidden=hidden, taps=()),
        logits=lambda hidden: LOGITS[: len(hidden)],
    )
    header = WaveHeader(
        number=0,
        tokens=(0,) * count,
        positions=positions,
        rows=tuple(range(count)),
        requests=(3,) * count,
        judged=(True,) * count,
        ancestors=((),) * count,
        commits=(),
        sampling=((3, params),),
    )
    tokens = TargetCompute(cast(TargetStage, model), kv, is_last=True).step(header, None).tokens
    assert tokens is not None
    return cast(Tensor, tokens).tolist()


def test_the_noise_is_that_of_the_position_behind_the_node() -> None:
    positions = (4, 5, 9, 10, 11, 12)
    behind = torch.tensor([position + 1 for position in positions])
    noise = gumbel(7, behind, torch.arange(VOCAB))
    expected = (LOGITS.double() + noise).argmax(-1).tolist()
    assert step(positions, SamplingParams(temperature=1.0, seed=7)) == expected


def test_a_drafter_with_the_targets_logits_is_always_right() -> None:
    params = SamplingParams(temperature=1.0, seed=11)
    positions = (4, 5, 9, 10, 11, 12)
    drafts = [
        int(candidates(LOGITS[place], torch.arange(VOCAB), params, position + 1, 1)[0][0])
        for place, position in enumerate(positions)
    ]
    assert drafts == step(positions, params)
