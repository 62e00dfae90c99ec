"""Every field of the command reaches the request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from megatron_spd.cli.generate import request_of
from megatron_spd.cli.target import Target
from megatron_spd.config import EvalOptions, GenerateOptions
from megatron_spd.inference.requests import Request
from megatron_spd.sampling import SamplingParams

SPEC = SimpleNamespace(eos_ids=(2, 7), max_positions=64)
TARGET = cast(
    Target,
    SimpleNamespace(
        folder=SimpleNamespace(spec=SPEC), tokenizer=SimpleNamespace(encode=lambda text: [1, 5, 9])
    ),
)
FIELDS = {"max_new_tokens": 9, "temperature": 0.5, "top_k": 3, "top_p": 0.25, "seed": 13}


def test_a_request_has_all_the_options() -> None:
    options = GenerateOptions(prompt="a", stop=("x", "yz"), **FIELDS)  # type: ignore[arg-type]
    assert request_of(TARGET, options, options.prompt, options.stop) == Request(
        prompt_ids=(1, 5, 9),
        max_new_tokens=9,
        sampling=SamplingParams(temperature=0.5, top_k=3, top_p=0.25, seed=13),
        eos_ids=frozenset({2, 7}),
        stop=("x", "yz"),
    )


def test_eval_asks_the_same_way() -> None:
    options = EvalOptions(prompts="p.jsonl", **FIELDS)  # type: ignore[arg-type]
    asked = request_of(TARGET, options, "a")
    assert asked.sampling == SamplingParams(temperature=0.5, top_k=3, top_p=0.25, seed=13)
    assert asked.eos_ids == {2, 7}
