"""Every field of the command reaches the request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from megatron_spd.cli.generate import engine_of, request_of
from megatron_spd.cli.target import Target
from megatron_spd.config import EvalOptions, GenerateOptions
from megatron_spd.errors import ConfigError
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


def test_width_and_repairs_reach_the_engine() -> None:
    options = GenerateOptions(prompt="a", module="m", width=4, repairs=True)
    engine = engine_of(options)
    assert (engine.width, engine.repairs, engine.is_chain) == (4, True, False)
    assert engine_of(EvalOptions(prompts="p.jsonl")).is_chain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"module": "m", "width": 0}, r"eval.width \(0\) must be at least 1"),
        ({"width": 4}, "eval.width is 4 and eval.repairs False, but without eval.module"),
        ({"repairs": True}, "eval.width is 1 and eval.repairs True, but without eval.module"),
    ],
)
def test_a_tree_of_nothing_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvalOptions(prompts="p.jsonl", **fields)  # type: ignore[arg-type]
