"""The choice of a token: noise, filters, ties and the distribution they give."""

import pytest
import torch
from torch import Tensor

from megatron_spd.errors import ConfigError, SpdError
from megatron_spd.sampling import SamplingParams, candidates, choose, gumbel, philox


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    a, b, c, d = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox((a, b, c, d), key)) == expected


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel(3, torch.arange(200), torch.arange(1000)).flatten()
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.01)
    assert noise.var().item() == pytest.approx(1.64493, abs=0.02)


def test_noise_of_a_token_does_not_depend_on_what_else_is_asked() -> None:
    full = gumbel(11, torch.arange(50), torch.arange(3000))
    ids = torch.randperm(3000, generator=torch.Generator().manual_seed(0))[:777]
    positions = torch.tensor([49, 7, 8])
    assert torch.equal(gumbel(11, positions, ids), full[positions][:, ids])


def test_noise_differs_by_seed_and_position() -> None:
    ids = torch.arange(64)
    rows = [
        gumbel(seed, torch.tensor([position]), ids)[0]
        for seed in (0, 1, 2**32, 2**64 - 1)
        for position in (0, 1, 2**32)
    ]
    for index, row in enumerate(rows):
        assert all(not torch.isclose(row, other).any() for other in rows[:index])


def exact_distribution(logits: Tensor, params: SamplingParams) -> list[float]:
    """The filtered softmax, by the definition, one token at a time."""
    chances = torch.softmax(logits.double() / params.temperature, dim=0).tolist()
    ranked = sorted(range(len(chances)), key=lambda token: (-chances[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    total = sum(chances[token] for token in ranked)
    kept, mass = [], 0.0
    for token in ranked:
        kept.append(token)
        mass += chances[token] / total
        if mass >= params.top_p:
            break
    total = sum(chances[token] for token in kept)
    return [chances[t] / total if t in kept else 0.0 for t in range(len(chances))]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, top_p=0.8, seed=2),
        SamplingParams(temperature=0.7, top_k=7, seed=3),
        SamplingParams(temperature=1.3, top_k=9, top_p=0.9, seed=4),
    ],
)
def test_choices_have_the_exact_distribution(params: SamplingParams) -> None:
    logits = torch.tensor([0.3 * token % 2.3 for token in range(16)])
    draws = 2500
    counts = torch.bincount(
        choose(logits.expand(draws, 16), [params] * draws, torch.arange(draws)), minlength=16
    ).tolist()
    expected = [chance * draws for chance in exact_distribution(logits, params)]
    outside = [count for count, mean in zip(counts, expected, strict=True) if mean == 0]
    assert sum(outside) == 0
    pairs = [(count, mean) for count, mean in zip(counts, expected, strict=True) if mean > 0]
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    freedom = len(pairs) - 1
    # The upper 0.1 % point, by Wilson and Hilferty.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.0902 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_lowest_id(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 500, dtype=dtype)
    logits[0, [3, 40, 499]] = 1
    logits[1, [499, 498]] = 2
    greedy = [SamplingParams()] * 3
    assert choose(logits, greedy, torch.arange(3)).tolist() == [3, 498, 0]


def test_a_top_k_tie_keeps_the_lowest_ids() -> None:
    params = SamplingParams(temperature=1.0, top_k=2, seed=5)
    chosen = choose(torch.zeros(200, 8), [params] * 200, torch.arange(200))
    assert set(chosen.tolist()) == {0, 1}


def test_top_k_of_one_is_greedy() -> None:
    logits = torch.randn(20, 30, generator=torch.Generator().manual_seed(1))
    one = [SamplingParams(temperature=2.0, top_k=1)] * 20
    assert torch.equal(choose(logits, one, torch.arange(20)), logits.argmax(dim=1))


def test_a_row_is_chosen_alike_alone_and_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(40, 1001, generator=generator)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=9),
        SamplingParams(temperature=1.0, top_p=0.7, seed=2**63),
        SamplingParams(temperature=1.1, top_k=50, seed=4),
    ]
    params = [kinds[row % 4] for row in range(40)]
    positions = torch.arange(40) * 7
    together = choose(logits, params, positions)
    order = torch.randperm(40, generator=generator).tolist()
    shuffled = choose(logits[order], [params[row] for row in order], positions[order])
    assert torch.equal(shuffled, together[order])
    for row in range(40):
        alone = choose(logits[row : row + 1], [params[row]], positions[row : row + 1])
        assert alone.item() == together[row].item()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=6),
        SamplingParams(temperature=1.2, top_k=5, top_p=0.9, seed=7),
    ],
)
def test_a_perfect_draft_always_names_the_choice_first(params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randperm(64, generator=generator)
    for position in range(50):
        logits = torch.randn(64, generator=generator)
        chosen = choose(logits[None], [params], torch.tensor([position]))
        drafted, log_probs = candidates(logits[ids], ids, params, position, 4)
        assert drafted[0].item() == chosen.item()
        assert len(set(drafted.tolist())) == 4
        scaled = logits.double() / (params.temperature or 1.0)
        expected = torch.log_softmax(scaled, dim=0)[drafted].float()
        assert torch.allclose(log_probs, expected)


def test_candidates_break_ties_by_id_and_stop_at_the_vocabulary() -> None:
    ids = torch.tensor([30, 10, 20])
    drafted, _ = candidates(torch.tensor([1.0, 1.0, 1.0]), ids, SamplingParams(), 0, 2)
    assert drafted.tolist() == [10, 20]
    drafted, log_probs = candidates(torch.tensor([1.0, 2.0, 3.0]), ids, SamplingParams(), 0, 9)
    assert drafted.tolist() == [20, 10, 30]
    assert log_probs.exp().sum().item() == pytest.approx(1.0)
    assert candidates(torch.zeros(3), ids, SamplingParams(), 0, 0)[0].tolist() == []


def test_candidates_put_filtered_tokens_last() -> None:
    params = SamplingParams(temperature=1.0, top_k=2, seed=1)
    for position in range(30):
        drafted, _ = candidates(torch.arange(8.0), torch.arange(8), params, position, 4)
        assert set(drafted[:2].tolist()) == {6, 7}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e-9),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_fields_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_a_row_without_a_largest_logit_is_refused() -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = float("nan")
    with pytest.raises(SpdError, match="row 1 is nan"):
        choose(logits, [SamplingParams()] * 2, torch.arange(2))
    assert choose(torch.zeros(0, 4), [], torch.zeros(0, dtype=torch.int64)).shape == (0,)
