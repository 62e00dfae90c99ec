import pytest
import torch

from megatron_spd.errors import ConfigError
from megatron_spd.speculation.aggregators import AttentionAggregator, build_aggregator, known_counts
from megatron_spd.stage_plan import StagePlan

PLAN = StagePlan.from_bounds((0, 2, 3, 6))
NAMES = ("concat", "shared", "attention")


def test_types_that_cannot_be_reached_are_not_built() -> None:
    few = StagePlan.from_bounds((0, 2, 3, 6, 8), taps=(0, 3))
    assert known_counts(few) == [1, 2]
    concat = build_aggregator("concat", few, 4)
    assert [tuple(weight.shape) for weight in concat.parameters()] == [(4, 4), (4, 8)]
    inner = StagePlan.from_bounds((0, 4), taps=(0, 1, 2, 4))  # 1 and 2 are never the newest
    assert known_counts(inner) == [1, 4]


@pytest.mark.parametrize("name", NAMES)
def test_unknown_taps_are_ignored(name: str) -> None:
    made = build_aggregator(name, PLAN, 8)
    taps = torch.randn(2, 5, 4, 8)
    for kind, count in enumerate(known_counts(PLAN)):
        other = taps.clone()
        other[..., count:, :] = torch.nan
        out = made(other, kind)
        assert out.shape == (2, 5, 8)
        torch.testing.assert_close(out, made(taps, kind))
        other[..., count - 1, :] += 1.0
        assert not torch.allclose(made(other, kind), out)


def test_concat_and_shared_are_the_written_sums() -> None:
    taps = torch.randn(3, 4, 8)
    concat = build_aggregator("concat", PLAN, 8)
    weight = list(concat.parameters())[2]
    torch.testing.assert_close(concat(taps, 2), taps[:, :3].flatten(1) @ weight.T)
    shared = build_aggregator("shared", PLAN, 8)
    state = shared.state_dict()
    wanted = sum(taps[:, i] @ state[f"blocks.{i}.weight"].T for i in range(3))
    torch.testing.assert_close(shared(taps, 2), wanted + state["type_vectors"][2])


def test_attention_over_one_tap_is_its_block() -> None:
    made = build_aggregator("attention", PLAN, 8)
    assert isinstance(made, AttentionAggregator)
    taps = torch.randn(3, 4, 8)
    torch.testing.assert_close(made(taps, 0), made.blocks[0](taps[:, 0]))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="mean"):
        build_aggregator("mean", PLAN, 8)
