"""A request, its result, and the one rule that says when a text ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_spd.errors import ConfigError
from megatron_spd.sampling import SamplingParams
from megatron_spd.schedule.machine import Counters

_SLACK = 12
"""Characters at a cut that may decode otherwise there: a lost space, the bytes of one character."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to continue and how."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int = 128
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ConfigError("the prompt has no tokens, at least one is needed")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}, expected 1 or more")
        if any(not text for text in self.stop):
            raise ConfigError("a stop string is empty; leave it out or give it characters")

    def limit(self, max_positions: int) -> int:
        """The position past the last one this request may fill.

        Raises:
            ConfigError: the prompt alone fills the context of `max_positions`.
        """
        length = len(self.prompt_ids)
        if length >= max_positions:
            raise ConfigError(
                f"the prompt has {length} tokens, the target's context holds {max_positions} "
                "and one must be left to generate; shorten the prompt"
            )
        return min(length + self.max_new_tokens, max_positions)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished text: ids, text and counters all end at the same token."""

    ids: tuple[int, ...]
    text: str
    finish_reason: str  # "stop" or "length"
    counters: Counters
    seconds: float
    num_stages: int

    @property
    def acceptance(self) -> float | None:
        """Accepted over judged; None when nothing was judged."""
        judged = self.counters.accepted + self.counters.rejected
        return self.counters.accepted / judged if judged else None

    @property
    def eal(self) -> float | None:
        """n * committed / cycles; None when no cycle ran after the first token."""
        cycles = self.counters.cycles
        return self.num_stages * self.counters.committed / cycles if cycles else None


class TextEnd:
    """Decides after each token whether the text is finished.

    Args:
        request: the request.
        limit: its position limit.
        decode: token ids -> text, used only when the request has stop strings.
    """

    def __init__(
        self, request: Request, limit: int, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._request, self._decode = request, decode
        self._room = limit - len(request.prompt_ids)
        self._reach = max((len(text) for text in request.stop), default=0) + _SLACK
        self.ids: list[int] = []
        self.reason: str | None = None

    def add(self, token: int) -> bool:
        """Take one committed token; True when the text ends with it."""
        self.ids.append(token)
        if token in self._request.eos_ids or self._stopped():
            self.reason = "stop"
        elif len(self.ids) >= self._room:
            self.reason = "length"
        return self.reason is not None

    def text(self) -> str:
        """The text, cut before a stop string that ended it and without the EOS token."""
        ids = self.ids[:-1] if self.ids and self.ids[-1] in self._request.eos_ids else self.ids
        cut = self._stop_at()
        return self._decode(ids)[:cut]

    def _stopped(self) -> bool:
        """Whether the newest token completes a stop string.

        Only the text's end is decoded: the newest token behind enough others to hold all that a
        stop string which it completes can begin with. What is found there is looked up in the whole
        text, because an end may decode otherwise than as a part of it.
        """
        if not self._request.stop:
            return False
        size = self._reach
        while size < len(self.ids) and len(self._decode(self.ids[-size - 1 : -1])) < self._reach:
            size *= 2  # tokens without text of their own: controls, bytes of one character
        end = self._decode(self.ids[-size - 1 :])
        return any(stop in end for stop in self._request.stop) and self._stop_at() is not None

    def _stop_at(self) -> int | None:
        if not self._request.stop:
            return None
        text = self._decode(self.ids)
        found = [at for at in (text.find(stop) for stop in self._request.stop) if at >= 0]
        return min(found) if found else None
