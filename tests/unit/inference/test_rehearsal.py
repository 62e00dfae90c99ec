import re
import time
from dataclasses import replace

import pytest
import torch

from megatron_spd.errors import ConfigError
from megatron_spd.inference.rehearsal import SleepingCompute, TokenScript
from megatron_spd.inference.ring import ring_edges
from megatron_spd.sampling import SamplingParams
from megatron_spd.stage_plan import StagePlan
from megatron_spd.wave import WaveHeader

HEADER = WaveHeader(
    number=4,
    tokens=(7, 8),
    positions=(0, 1),
    rows=(0, 1),
    requests=(0, 0),
    judged=(False, True),
    ancestors=((), (0,)),
    commits=(),
    sampling=((0, SamplingParams()),),
)


def shares(script: TokenScript, width: int, length: int) -> list[float]:
    """How often the true token is among the best 1, 2, .. `width` candidates."""
    hits = [0] * width
    for position in range(length):
        found = script.candidates(position, width)
        assert len(set(found)) == width
        for best in range(width):
            hits[best] += script.token(position) in found[: best + 1]
    return [hit / length for hit in hits]


def test_candidates_are_right_as_often_as_asked() -> None:
    agreement = (0.59, 0.72, 0.79, 0.83)
    script = TokenScript(agreement, length=20_000, vocab_size=6, seed=3)
    assert shares(script, 4, 20_000) == pytest.approx(agreement, abs=0.01)
    # fewer candidates are the best of more, and more than there are shares add nothing
    assert script.candidates(11, 2) == script.candidates(11, 4)[:2]
    assert shares(script, 5, 20_000)[4] == shares(script, 4, 20_000)[3]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_always_and_never_right(share: float) -> None:
    assert shares(TokenScript((share,), length=50, vocab_size=2), 1, 50) == [share]


def test_a_script_is_a_function_of_its_seed() -> None:
    first, again, other = (TokenScript((0.5,), length=30, vocab_size=9, seed=s) for s in (1, 1, 2))
    texts = [[script.candidates(at)[0] for at in range(30)] for script in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("agreement", "vocab_size", "said"),
    [((), 9, "between 0 and 1"), ((1.2,), 9, "1.2"), ((0.5, 0.4), 9, "fall"), ((0.5,), 1, "(1)")],
)
def test_bad_scripts_are_refused(agreement: tuple[float, ...], vocab_size: int, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        TokenScript(agreement, length=3, vocab_size=vocab_size)


def test_a_sleeping_stage_takes_its_time_and_gives_what_a_stage_gives() -> None:
    plan = StagePlan.even(4, 2, taps=(0, 1, 2, 4))
    script = TokenScript((0.5,), length=9, vocab_size=50)
    first, last = (
        SleepingCompute(plan, stage, script, seconds=0.01, hidden_size=8, dtype=torch.bfloat16)
        for stage in (0, 1)
    )
    started = time.perf_counter()
    result = first.step(HEADER, None)
    assert time.perf_counter() - started >= 0.0099
    assert result.hidden.shape == (2, 8) and result.hidden.dtype == torch.bfloat16
    assert result.taps.shape == (2, 2, 8) and result.tokens is None
    result = last.step(HEADER, result.hidden)
    assert result.taps.shape == (1, 2, 8) and result.tokens is not None
    assert result.tokens.dtype == torch.int64
    assert result.tokens.tolist() == [-1, script.token(2)]


def test_the_median_wave_takes_the_stages_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], []

    def sleep_late(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds + (0.05 if len(slept) % 10 == 0 else 0.0002)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep_late)
    stage = SleepingCompute(
        StagePlan.even(2, 2),
        0,
        TokenScript((0.5,), length=9, vocab_size=50),
        seconds=0.01,
        hidden_size=8,
        dtype=torch.float32,
    )
    for _ in range(100):
        stage.step(HEADER, None)
    assert slept[0] == 0.01
    assert slept[-1] == pytest.approx(0.0098, abs=5e-5)


def test_the_ring_passes_every_stage_and_ends_at_the_driver() -> None:
    own = StagePlan.even(3, 3, module_own_rank=True)
    assert ring_edges(own) == [(3, 0), (0, 1), (1, 2), (2, 3)]
    beside = StagePlan.even(3, 3)
    assert ring_edges(beside) == [(0, 1), (1, 2), (2, 0)]
    assert ring_edges(replace(beside, module_rank=1)) == [(1, 0), (0, 1), (1, 2), (2, 1)]
    assert ring_edges(StagePlan.even(3, 1)) == []
