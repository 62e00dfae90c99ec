"""Training rows against a plain masked oracle, and against the served rows."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron_spd.attention import masked_attention
from megatron_spd.errors import ConfigError
from megatron_spd.schedule.depths import depth_of
from megatron_spd.speculation.config import ModuleConfig
from megatron_spd.speculation.module import SpeculationModule
from megatron_spd.speculation.moments import moment_attention, valid_rows
from megatron_spd.stage_plan import StagePlan
from megatron_spd.target_spec import RopeSpec

PLAN = StagePlan.from_bounds((0, 2, 3, 6))
STAGES = PLAN.num_stages
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 4 + [2] * 2 + [-1], [5] * 14])
POSITIONS = torch.tensor([[*range(7), *range(4), *range(2), 0], [*range(14)]])


class FakeRows:
    """The part of KvRows that serving uses."""

    def __init__(self, num_layers: int, num_rows: int, kv_heads: int, head_dim: int) -> None:
        self.keys = torch.zeros(num_layers, num_rows, kv_heads, head_dim)
        self.values = torch.zeros_like(self.keys)

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        self.keys[layer, rows] = key
        self.values[layer, rows] = value


def build(aggregator: str = "concat", head: str = "linear") -> SpeculationModule:
    torch.manual_seed(0)
    config = ModuleConfig(
        hidden_size=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        intermediate_size=24,
        vocab_size=20,
        norm_eps=1e-5,
        rope=RopeSpec(rope_type="default", theta=10000.0),
        aggregator=aggregator,
        head=head,
        draft_vocab_size=8,
        bounds=PLAN.bounds,
        taps=PLAN.taps,
    )
    return SpeculationModule(config, PLAN)


def text() -> tuple[Tensor, Tensor]:
    """Taps [2, 14, T, 16] and a fill for each moment."""
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(2, 14, len(PLAN.taps), 16, generator=generator)
    return taps, torch.randint(1, STAGES + 1, (2, 14), generator=generator)


def test_two_part_attention_equals_the_masked_oracle() -> None:
    torch.manual_seed(2)
    _, fill = text()
    query = torch.randn(2, 14, STAGES, 4, 4, dtype=torch.float64, requires_grad=True)
    own = [torch.randn(2, 14, STAGES, 2, 4, dtype=torch.float64) for _ in range(2)]
    deep = [torch.randn(2, 14, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    valid = valid_rows(DOCUMENTS, fill, STAGES)
    key, value = (torch.cat([d, o.flatten(1, 2)], 1) for d, o in zip(deep, own, strict=True))
    visible = torch.zeros(2, 14 * STAGES, 14 + 14 * STAGES, dtype=torch.bool)
    for b, u, d in valid.nonzero().tolist():
        flight = int(fill[b, u])
        for t in range(u + 1):
            if DOCUMENTS[b, t] != DOCUMENTS[b, u] or t > u - d:
                continue
            depth = depth_of(u - t, flight, STAGES)
            column = t if depth == STAGES else 14 + u * STAGES + depth
            visible[b, u * STAGES + d, column] = True
    visible[~valid.flatten(1)] = True  # rows that do not exist: any answer
    oracle = masked_attention(query.flatten(1, 2), key, value, visible).unflatten(1, (14, STAGES))
    weight = torch.randn_like(oracle) * valid[..., None, None]
    wanted = torch.autograd.grad((oracle * weight).sum(), [query, *deep])
    for chunk in (3, 64):
        got = moment_attention((query, own[0], own[1]), (deep[0], deep[1]), DOCUMENTS, fill, chunk)
        torch.testing.assert_close(got[valid], oracle[valid])
        grads = torch.autograd.grad((got * weight).sum(), [query, *deep])
        for grad, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, want)


def test_valid_rows_respect_fill_documents_and_padding() -> None:
    valid = valid_rows(DOCUMENTS, torch.full((2, 14), 2), STAGES)
    assert valid[1, 0].tolist() == [True, False, False]
    assert valid[1, 5].tolist() == [True, True, False]
    assert valid[0, 7].tolist() == [True, False, False]  # the first of document 1
    assert not valid[0, 13].any()


def serve(module: SpeculationModule, taps: Tensor, start: int, moment: int, flight: int) -> Tensor:
    """Rows of one moment, newest first, as the engine would serve them: [flight or less, H]."""
    count = moment - start + 1
    pool: Any = FakeRows(module.config.num_layers, count, 2, 4)
    feature = [
        module.features(taps[t], depth_of(moment - t, flight, STAGES))
        for t in range(start, moment + 1)
    ]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(moment))
    complete = max(0, count - flight)
    hidden: list[Tensor] = []
    for part in (range(complete), range(complete, count)):  # the complete ones came in earlier
        if not len(part):
            continue
        index = torch.tensor(list(part))
        visible = torch.zeros(len(part), count, dtype=torch.bool)
        for at, t in enumerate(part):
            visible[at, order[: t + 1]] = True
        features = torch.stack([feature[t] for t in part])
        hidden = list(module.forward_rows(features, index, visible, order[index], cast(Any, pool)))
    return torch.stack(hidden[::-1])


@pytest.mark.parametrize("aggregator", ["concat", "shared", "attention"])
@torch.no_grad()
def test_served_rows_equal_trained_rows(aggregator: str) -> None:
    module = build(aggregator)
    taps, fill = text()
    trained = module.forward_moments(taps, POSITIONS, DOCUMENTS, fill, chunk_moments=4)
    for b in range(2):
        for u in range(14):
            if DOCUMENTS[b, u] < 0:
                continue
            start = u - int(POSITIONS[b, u])
            served = serve(module, taps[b], start, u, int(fill[b, u]))
            assert int(trained.valid[b, u].sum()) == len(served)
            got = trained.hidden[b, u, : len(served)]
            torch.testing.assert_close(got, served, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_deepest_rows_equal_a_plain_served_text() -> None:
    module = build()
    taps, fill = text()
    trained = module.forward_moments(taps, POSITIONS, DOCUMENTS, fill)
    pool: Any = FakeRows(2, 14, 2, 4)
    visible = torch.ones(14, 14, dtype=torch.bool).tril()
    features = module.features(taps[1], STAGES)
    served = module.forward_rows(features, POSITIONS[1], visible, torch.arange(14), pool)
    torch.testing.assert_close(trained.deepest[1], served, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_served_rows_equal_trained_rows_with_the_real_pool() -> None:
    kv_rows = pytest.importorskip("megatron_spd.kv_rows", reason="kv_rows is not there")
    module = build()
    taps, _ = text()
    fill = torch.full((2, 14), STAGES)
    trained = module.forward_moments(taps, POSITIONS, DOCUMENTS, fill)
    pool = kv_rows.KvRows(2, 20, 2, 4, torch.float32, "cpu")
    rows, positions = torch.arange(14) + 3, torch.arange(14)
    pool.insert(rows, positions)
    complete = 14 - STAGES
    pool.commit(rows[:complete], torch.zeros(complete, dtype=torch.int64))
    ancestors = torch.full((14, STAGES), -1)
    for t in range(complete, 14):
        ancestors[t, : t - complete] = rows[complete:t]
    visible = pool.visible(rows, torch.zeros(14, dtype=torch.int64), positions, ancestors)
    depths = [depth_of(13 - t, STAGES, STAGES) for t in range(14)]
    features = torch.stack([module.features(taps[1, t], depths[t]) for t in range(14)])
    served = module.forward_rows(features, positions, visible, rows, pool)
    torch.testing.assert_close(
        trained.hidden[1, 13], served[complete:].flip(0), atol=1e-5, rtol=1e-5
    )


@torch.no_grad()
def test_another_document_changes_nothing() -> None:
    module = build()
    taps, fill = text()
    before = module.forward_moments(taps, POSITIONS, DOCUMENTS, fill)
    taps[0, :7] += 1.0
    after = module.forward_moments(taps, POSITIONS, DOCUMENTS, fill)
    valid = before.valid[0, 7:13]
    torch.testing.assert_close(before.hidden[0, 7:13][valid], after.hidden[0, 7:13][valid])
    torch.testing.assert_close(before.deepest[0, 7:13], after.deepest[0, 7:13])


def test_gradient_reaches_every_weight() -> None:
    for aggregator in ("concat", "shared", "attention"):
        module = build(aggregator, "mlp")
        taps, fill = text()
        made = module.forward_moments(taps, POSITIONS, DOCUMENTS, fill, chunk_moments=5)
        logits = module.logits(torch.cat([made.hidden[made.valid], made.deepest.flatten(0, 1)]))
        logits.square().sum().backward()
        missing = [name for name, weight in module.named_parameters() if weight.grad is None]
        assert missing == []


def test_draft_ids_in_any_order_pick_the_targets_rows() -> None:
    module = build()
    ids = torch.tensor([9, 3, 19, 0, 5, 7, 1, 2])
    module.set_draft_ids(ids)
    lm_head, norm = torch.randn(20, 16), torch.rand(16) + 0.5
    module.init_from_target(lm_head, norm)
    hidden = torch.randn(3, 16)
    scaled = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-5) * norm
    torch.testing.assert_close(module.logits(hidden), (scaled @ lm_head.T)[:, ids])
    mlp = build(head="mlp")
    mlp.set_draft_ids(ids)
    mlp.init_from_target(lm_head, norm)
    torch.testing.assert_close(mlp.logits(hidden), module.logits(hidden))
    assert "final_norm" not in dict(module.named_parameters())


@pytest.mark.parametrize("ids", [[0] * 8, [*range(7)], [*range(7), 20]])
def test_draft_ids_that_do_not_fit_are_refused(ids: list[int]) -> None:
    with pytest.raises(ConfigError, match="draft ids"):
        build().set_draft_ids(torch.tensor(ids))


def test_config_round_trip_and_another_plan_is_refused() -> None:
    module = build()
    assert ModuleConfig.from_dict(module.config.to_dict()) == module.config
    with pytest.raises(ConfigError, match="unknown"):
        ModuleConfig.from_dict({**module.config.to_dict(), "colour": 1})
    with pytest.raises(ConfigError, match="the plan has bounds"):
        SpeculationModule(module.config, StagePlan.from_bounds((0, 6)))
