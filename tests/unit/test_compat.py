"""Each patch of compat has a test that fails without it."""

import pytest
import torch

from megatron_spd import compat
from megatron_spd.errors import CompatError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compat is for CPU ranks")


@pytest.fixture(autouse=True)
def applied() -> None:
    compat.apply()


def test_current_device_is_a_place_to_allocate() -> None:
    assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"


def test_synchronize_lets_the_timers_run() -> None:
    from megatron.core.timers import Timer

    timer = Timer("forward")
    timer.start()
    timer.stop()
    assert timer.elapsed(reset=False) >= 0


def test_literal_cuda_factories_give_cpu_tensors() -> None:
    from megatron.core.transformer.utils import get_default_causal_mask

    with pytest.raises((AssertionError, RuntimeError)):
        get_default_causal_mask(3)
    with compat.cpu_factories():
        mask = get_default_causal_mask(3)
    assert mask.tolist() == [[False, True, True], [False, False, True], [False, False, False]]


def test_rng_tracker_forks_without_cuda_states() -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        assert torch.rand(2).shape == (2,)


def test_a_second_apply_does_nothing() -> None:
    before = torch.cuda.current_device
    compat.apply()
    assert torch.cuda.current_device is before


def test_refused_where_cuda_is_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_applied", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(CompatError, match="CUDA is present"):
        compat.apply()


def test_other_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_applied", [])
    monkeypatch.setattr(compat, "version", lambda name: "0.17.0")
    with pytest.raises(CompatError, match="found 0.17.0"):
        compat.apply()
