import math

import pytest
import torch
from torch import Tensor

from megatron_spd.errors import ConfigError
from megatron_spd.speculation.losses import (
    LOSSES,
    OUTSIDE_MASS,
    LossSums,
    blend_weight,
    distillation_loss,
    fill_distribution,
    token_losses,
)

IDS = torch.tensor([7, 2, 9, 4, 0])


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Module rows [23, 6], head [5, 6], target logits [11, 12] and weights [23]."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(23, 6), (5, 6), (11, 12), (23,)]
    hidden, head, target, weights = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )
    weights = weights.abs()
    weights[::4] = 0.0
    return hidden.requires_grad_(), head.requires_grad_(), target, weights


def run(dtype: torch.dtype, kind: str, chunk: int) -> tuple[LossSums, tuple[Tensor, ...]]:
    hidden, head, target, weights = case(dtype)
    sums = distillation_loss(
        hidden,
        lambda rows: rows @ head.T,
        target,
        lambda rows: rows,
        IDS,
        weights,
        target_rows=torch.arange(23) % 11,
        kind=kind,
        acceptance=0.4,
        chunk_tokens=chunk,
    )
    return sums, torch.autograd.grad(sums.loss, [hidden, head])


@pytest.mark.parametrize("kind", LOSSES)
def test_chunks_change_nothing_and_float32_is_near_float64(kind: str) -> None:
    whole, grads = run(torch.float32, kind, 100)
    chunked, chunk_grads = run(torch.float32, kind, 3)
    exact, exact_grads = run(torch.float64, kind, 100)
    for name in ("loss", "weight", "overlap", "agreement"):
        torch.testing.assert_close(getattr(whole, name), getattr(chunked, name))
        torch.testing.assert_close(
            getattr(whole, name).double(), getattr(exact, name), rtol=1e-5, atol=1e-5
        )
    for grad, other, wanted in zip(grads, chunk_grads, exact_grads, strict=True):
        torch.testing.assert_close(grad, other)
        torch.testing.assert_close(grad.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", LOSSES)
def test_gradient_matches_finite_differences(kind: str) -> None:
    _, _, target, _ = case(torch.float64)
    draft = torch.randn(11, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    assert torch.autograd.gradcheck(
        lambda logits: token_losses(logits, target, IDS, kind, 0.4)[0], draft.requires_grad_()
    )


def test_values_are_the_written_sums() -> None:
    _, _, target, _ = case(torch.float64)
    draft = torch.randn(11, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    p, q = target.softmax(-1), draft.softmax(-1)
    full = torch.zeros(11, 12, dtype=torch.float64)
    full[:, IDS] = q
    overlap = torch.minimum(p, full).sum(-1)
    torch.testing.assert_close(token_losses(draft, target, IDS, "tv", 0)[0], 1 - overlap)
    torch.testing.assert_close((p - full).abs().sum(-1) / 2, 1 - overlap)
    hard = token_losses(draft, target, IDS, "overlap", 0)[0]
    torch.testing.assert_close(hard, -overlap.log())
    inside = p[:, IDS]
    rest = 1 - inside.sum(-1)
    kl = (inside * (inside / (q * (1 - OUTSIDE_MASS))).log()).sum(-1)
    kl = kl + rest * (rest / OUTSIDE_MASS).log()
    torch.testing.assert_close(token_losses(draft, target, IDS, "kl", 0)[0], kl)
    blend = token_losses(draft, target, IDS, "blend", 0.5)[0]
    share = math.exp(-1.5)
    torch.testing.assert_close(blend, share * kl + (1 - share) * hard)
    assert blend_weight(0.0) == 1.0


def test_mass_outside_counts_and_a_perfect_module_loses_nothing_else() -> None:
    _, _, target, _ = case(torch.float64)
    copied = target[:, IDS]
    outside = 1 - target.softmax(-1)[:, IDS].sum(-1)
    loss, overlap, _ = token_losses(copied, target, IDS, "tv", 0)
    torch.testing.assert_close(loss, outside)
    everything = torch.randperm(12)
    for kind in LOSSES:
        loss, overlap, agreement = token_losses(
            target[:, everything], target, everything, kind, 0.5
        )
        torch.testing.assert_close(loss, torch.zeros_like(loss), atol=1e-9, rtol=0)
        assert bool((agreement == 1).all())
        torch.testing.assert_close(overlap, torch.ones_like(overlap))


def test_masked_target_logits_stay_finite() -> None:
    target = torch.zeros(2, 12)
    target[:, [2, 5]] = -torch.inf
    for kind in LOSSES:
        draft = torch.zeros(2, 5, requires_grad=True)
        loss = token_losses(draft, target, IDS, kind, 0.5)[0].sum()
        (grad,) = torch.autograd.grad(loss, draft)
        assert bool(loss.isfinite())
        assert bool(grad.isfinite().all())


def test_no_weight_gives_zero_with_a_gradient() -> None:
    hidden = torch.randn(4, 6, requires_grad=True)
    sums = distillation_loss(
        hidden, lambda r: r[:, :5], torch.randn(4, 12), lambda r: r, IDS, torch.zeros(4)
    )
    sums.loss.backward()
    assert float(sums.loss.detach()) == 0.0
    assert float(sums.weight) == 0.0


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 1.0])
def test_fill_distribution(acceptance: float) -> None:
    chances = fill_distribution(acceptance, 4)
    a = acceptance
    wanted = [1 - a, (1 - a) * a, (1 - a) * a**2, a**3]
    assert chances.tolist() == pytest.approx(wanted)
    assert float(chances.sum()) == pytest.approx(1.0)
    assert fill_distribution(acceptance, 1).tolist() == [1.0]


def test_unknown_loss_and_acceptance_are_refused() -> None:
    with pytest.raises(ConfigError, match="loss 'mse'"):
        token_losses(torch.zeros(1, 5), torch.zeros(1, 12), IDS, "mse", 0.0)
    with pytest.raises(ConfigError, match="acceptance"):
        fill_distribution(1.5, 4)
