"""When a text ends: ids, text and reason agree at the same token."""

import pytest

from megatron_spd.errors import ConfigError
from megatron_spd.inference.requests import Request, TextEnd


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
