"""When a text ends: ids, text and reason agree at the same token."""

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_spd.checkpoint.tokenizer import Tokenizer
from megatron_spd.errors import ConfigError
from megatron_spd.inference.requests import Request, TextEnd

SHARED = Path(os.environ.get("SPD_SHARED", Path(__file__).resolve().parents[3] / ".." / "shared"))
STORIES = SHARED / "models" / "stories260k"

needs_stories = pytest.mark.skipif(
    not STORIES.exists(), reason="needs shared/models/stories260k beside the project"
)


def letters(ids: object) -> str:
    return "".join(chr(97 + i) for i in ids)  # type: ignore[attr-defined]


def run(request: Request, tokens: list[int], max_positions: int = 100) -> TextEnd:
    end = TextEnd(request, request.limit(max_positions), letters)
    for token in tokens:
        if end.add(token):
            break
    return end


@pytest.mark.parametrize("eos", [3, 5])
def test_each_of_several_eos_ids_ends_the_text(eos: int) -> None:
    request = Request(prompt_ids=(1,), eos_ids=frozenset({3, 5}))
    end = run(request, [0, 1, eos, 7])
    assert (end.ids, end.text(), end.reason) == ([0, 1, eos], "ab", "stop")


def test_a_first_token_may_already_be_eos() -> None:
    end = run(Request(prompt_ids=(1,), eos_ids=frozenset({4})), [4, 1])
    assert (end.ids, end.text(), end.reason) == ([4], "", "stop")


def test_a_stop_string_across_tokens_cuts_the_text() -> None:
    end = run(Request(prompt_ids=(1,), stop=("cd", "zz")), [0, 1, 2, 3, 4])
    assert (end.ids, end.text(), end.reason) == ([0, 1, 2, 3], "ab", "stop")


def test_a_stop_string_at_the_cap_still_says_stop() -> None:
    end = run(Request(prompt_ids=(1,), max_new_tokens=3, stop=("c",)), [0, 1, 2, 3])
    assert (len(end.ids), end.reason) == (3, "stop")


@pytest.mark.parametrize("cap", range(1, 8))
def test_max_new_tokens_is_exact(cap: int) -> None:
    end = run(Request(prompt_ids=(1, 2), max_new_tokens=cap), list(range(10)))
    assert (len(end.ids), end.reason) == (cap, "length")


def test_the_context_ends_the_text_with_reason_length() -> None:
    request = Request(prompt_ids=tuple(range(17)), max_new_tokens=50)
    end = run(request, list(range(20)), max_positions=20)
    assert (len(end.ids), end.reason) == (3, "length")


def test_bad_requests_are_refused_with_both_values() -> None:
    with pytest.raises(ConfigError, match="no tokens"):
        Request(prompt_ids=())
    with pytest.raises(ConfigError, match="max_new_tokens is 0"):
        Request(prompt_ids=(1,), max_new_tokens=0)
    with pytest.raises(ConfigError, match="stop string is empty"):
        Request(prompt_ids=(1,), stop=("",))
    with pytest.raises(ConfigError, match="21 tokens, the target's context holds 20"):
        Request(prompt_ids=tuple(range(21))).limit(20)


def whole_text_says(
    request: Request, ids: list[int], decode: Callable[[Sequence[int]], str]
) -> bool:
    return any(stop in decode(ids) for stop in request.stop)


@needs_stories
@pytest.mark.parametrize("seed", range(20))
def test_the_decoded_end_finds_a_stop_string_where_the_whole_text_has_it(seed: int) -> None:
    tokenizer = Tokenizer(STORIES)
    draw = random.Random(seed)
    pieces = tokenizer.encode(
        "Lily saw a dog. She said, caf\u00e9 \u20ac \U0001f600 na\u00efve", bos=False
    )
    ids = [draw.choice([*pieces, 1, 2]) for _ in range(60)]
    place = draw.randrange(len(ids))
    ids[place:place] = tokenizer.encode("dog \u20ac\U0001f600!", bos=False)
    request = Request(prompt_ids=(1,), stop=("g \u20ac", "\U0001f600!", ". She said"))
    end = TextEnd(request, request.limit(500), tokenizer.decode)
    for count, token in enumerate(ids, start=1):
        ended = end.add(token)
        assert ended == whole_text_says(request, ids[:count], tokenizer.decode)
        if ended:
            break
    assert end.reason == "stop"


def test_a_long_text_is_not_decoded_anew_for_every_token() -> None:
    sizes: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return letters([token % 20 for token in ids])

    request = Request(prompt_ids=(1,), max_new_tokens=600, stop=("zz",))
    end = TextEnd(request, request.limit(1000), decode)
    for token in range(500):
        assert not end.add(token)
    assert max(sizes) < 40


def test_tokens_without_text_widen_the_decoded_end() -> None:
    def decode(ids: Sequence[int]) -> str:
        return letters([token for token in ids if token < 20])

    request = Request(prompt_ids=(1,), max_new_tokens=600, stop=("ab",))
    end = TextEnd(request, request.limit(1000), decode)
    assert not any(end.add(token) for token in [5] * 40 + [0] + [30] * 100)
    assert end.add(1)
    assert end.text() == "f" * 40
