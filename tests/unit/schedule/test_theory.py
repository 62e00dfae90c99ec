import pytest

from megatron_spd.schedule.simulate import simulate
from megatron_spd.schedule.theory import eal_of


def test_theory_meets_both_ends() -> None:
    assert (eal_of(1.0, 4), eal_of(0.0, 4)) == (4.0, 1.0)


def test_a_long_simulated_text_comes_near() -> None:
    # every fifth draft is wrong: acceptance 0.8
    counters = simulate(
        8, 2000, target=lambda at: at + 1, drafter=lambda at: -1 if at % 5 == 0 else at + 1
    ).counters
    acceptance = counters.accepted / (counters.accepted + counters.rejected)
    assert acceptance == pytest.approx(0.8, abs=1e-3)
    assert 8 * counters.committed / counters.cycles == pytest.approx(
        eal_of(acceptance, 8), rel=5e-3
    )
