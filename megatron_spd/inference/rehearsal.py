"""A rehearsal of decoding: the real engine over stages that sleep and a text that is known.

A stage that sleeps uses no core, so many ranks on few cores show what the schedule, the messages
and the driver cost beside a stage time that is given.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_spd.errors import ConfigError
from megatron_spd.inference.stage_worker import WaveResult
from megatron_spd.sampling import SamplingParams
from megatron_spd.schedule.machine import Machine, Node
from megatron_spd.stage_plan import StagePlan
from megatron_spd.wave import WaveHeader

_LEARN_S = 1e-5
"""Seconds by which a wave corrects the lateness that a sleeping stage expects."""


class TokenScript:
    """A text of `length` positions, and the candidates that a drafter has for each.

    Whether a position's draft is right is a property of the position, not of the moment it is
    drafted in, so the same script costs the same cycles however it is run.

    Args:
        agreement: chance that the token is among the best 1, 2, .. candidates, each at least
            the one before.
        length: positions from 0 on, the prompt included.
        vocab_size: tokens there are; more than there are candidates.
        seed: of the text and of which candidates are right.
    """

    def __init__(
        self, agreement: Sequence[float], *, length: int, vocab_size: int, seed: int = 0
    ) -> None:
        if not agreement or any(not 0 <= share <= 1 for share in agreement):
            raise ConfigError(f"agreement {list(agreement)} must hold shares between 0 and 1")
        if list(agreement) != sorted(agreement):
            raise ConfigError(f"agreement {list(agreement)} must not fall from top-1 on")
        if vocab_size <= len(agreement):
            raise ConfigError(
                f"vocab_size ({vocab_size}) must exceed the {len(agreement)} candidates a position"
            )
        coin = random.Random(seed)
        self._vocab = vocab_size
        self._text = [coin.randrange(vocab_size) for _ in range(length)]
        self._place = [_place(agreement, coin.random()) for _ in range(length)]

    def token(self, position: int) -> int:
        """The target's token at a position; past the text's end, of which none is read, 0."""
        return self._text[position] if position < len(self._text) else 0

    def candidates(self, position: int, width: int = 1) -> list[int]:
        """The `width` best candidates for a position, best first, all different."""
        true = self.token(position)
        found = [(true + 1 + place) % self._vocab for place in range(width)]
        right = self._place[position] if position < len(self._place) else None
        if right is not None and right < width:
            found.insert(right, true)
        return found[:width]


class RehearsedDrafter:
    """Proposes the best candidate of a script and reads no taps."""

    def __init__(self, script: TokenScript) -> None:
        self._script = script

    def observe(self, nodes: Sequence[Node], stage: int, taps: Tensor | None) -> None:
        """A script reads no taps."""

    def propose(self, machine: Machine, request: int, sampling: SamplingParams) -> None:
        """The scripted token behind the newest node."""
        newest = machine.path(request)[-1]
        machine.propose(newest, self._script.candidates(newest.position + 1)[0])

    def enter(self, machine: Machine, request: int) -> None:
        """All was proposed before."""

    def forget(self, request: int) -> None:
        """A script keeps nothing of a request."""


class SleepingCompute:
    """A stage that takes `seconds` for any wave and gives zeros of the right shapes.

    A sleeper wakes late, which a stage that computes does not: the usual lateness is learned and
    slept less, so that the median wave takes `seconds`.

    Args:
        plan: the plan.
        stage: the stage it stands for.
        script: what the last stage chooses.
        seconds: from a wave's arrival to its result.
        hidden_size: H.
        dtype: of hidden states and taps.
    """

    def __init__(
        self,
        plan: StagePlan,
        stage: int,
        script: TokenScript,
        *,
        seconds: float,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._script, self._seconds = script, seconds
        self._hidden_size, self._dtype = hidden_size, dtype
        self._num_taps = len(plan.taps_of(stage))
        self._is_last = stage == plan.num_stages - 1
        self._late = 0.0

    def step(self, header: WaveHeader, hidden: Tensor | None) -> WaveResult:
        """Sleep out the stage's time; making the tensors is part of it."""
        until = time.perf_counter() + self._seconds
        shape = (header.num_nodes, self._hidden_size)
        result = WaveResult(
            hidden=torch.zeros(shape, dtype=self._dtype),
            taps=torch.zeros((self._num_taps, *shape), dtype=self._dtype),
            tokens=self._choose(header) if self._is_last else None,
        )
        time.sleep(max(0.0, until - self._late - time.perf_counter()))
        # small steps of one size follow the median: a wave that was held up moves it no further
        step = _LEARN_S if time.perf_counter() > until else -_LEARN_S
        self._late = min(max(0.0, self._late + step), self._seconds)
        return result

    def _choose(self, header: WaveHeader) -> Tensor:
        pairs = zip(header.positions, header.judged, strict=True)
        return torch.tensor([self._script.token(at + 1) if asked else -1 for at, asked in pairs])


def _place(agreement: Sequence[float], draw: float) -> int | None:
    """Which candidate is right when a uniform draw falls so; None when none is."""
    return next((place for place, share in enumerate(agreement) if draw < share), None)
