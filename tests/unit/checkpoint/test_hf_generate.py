"""Batches of text by transformers: like one text alone, without padding, the same every time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spd.checkpoint.hf_generate import (
    greedy_ids,
    load_model,
    pick,
    plain_generate,
    write_batch,
)
from megatron_spd.errors import CheckpointError, SpdError
from megatron_spd.sampling import SamplingParams

MakeFolder = Callable[..., Path]
PROMPTS = [[1], [1, 5, 9, 11, 4], [1, 7, 3], [2, 2]]
WARM = SamplingParams(temperature=1.0, seed=3)


def written(model: Any, sampling: SamplingParams, number: int = 0, **changes: Any) -> Any:
    fields = {"limits": [20, 24, 22, 64], "eos_ids": frozenset()}
    return write_batch(model, PROMPTS, **{**fields, **changes}, sampling=sampling, number=number)


def test_a_greedy_batch_is_what_generate_writes_for_each_prompt(make_folder: MakeFolder) -> None:
    folder = make_folder()
    model = load_model(folder)
    # the shortest texts end first and leave the batch on the way
    for prompt, text, limit in zip(
        PROMPTS, written(model, SamplingParams()), (20, 24, 22, 64), strict=True
    ):
        assert text == prompt + plain_generate(folder, prompt, limit - len(prompt))


def test_stories_batch_equals_one_at_a_time(shared: Path) -> None:
    model = load_model(shared / "models" / "stories260k")
    prompts = [[1], [1, 403, 407, 261, 378], [1, 274, 287]]
    texts = write_batch(
        model,
        prompts,
        limits=[60, 60, 30],
        eos_ids=frozenset({2}),
        sampling=SamplingParams(),
        number=0,
    )
    for prompt, text in zip(prompts, texts, strict=True):
        assert text == prompt + greedy_ids(model, prompt, len(text) - len(prompt), [2])


def test_a_text_ends_behind_any_end_token_or_at_its_limit(make_folder: MakeFolder) -> None:
    model = load_model(make_folder())
    ends = frozenset({4, 8, 15, 16, 23})
    for text, prompt, limit in zip(
        written(model, WARM, eos_ids=ends), PROMPTS, (20, 24, 22, 64), strict=True
    ):
        tail = text[len(prompt) :]
        assert text[: len(prompt)] == prompt
        assert not ends & set(tail[:-1])
        assert tail[-1] in ends or len(text) == limit


def test_the_noise_is_a_function_of_seed_and_batch(make_folder: MakeFolder) -> None:
    model = load_model(make_folder())
    first = written(model, WARM)
    assert first == written(model, WARM)
    assert first != written(model, WARM, number=1)
    assert first != written(model, SamplingParams(temperature=1.0, seed=4))


def test_the_callback_counts_every_token(make_folder: MakeFolder) -> None:
    seen: list[tuple[int, int]] = []
    texts = written(
        load_model(make_folder()), WARM, on_token=lambda done, new: seen.append((done, new))
    )
    assert sum(new for _, new in seen) == sum(map(len, texts)) - sum(map(len, PROMPTS))
    assert seen[-1][0] == len(PROMPTS)


def test_pick_follows_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    uniform = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    params = SamplingParams(temperature=0.5)
    counts = torch.bincount(pick(logits.expand(4000, 4), params, uniform), minlength=4)
    assert torch.allclose(counts / 4000, torch.softmax(logits[0] / 0.5, dim=0), atol=1e-3)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1.0, top_k=2), {1, 2}),
        (SamplingParams(temperature=1.0, top_p=0.6), {2}),  # softmax: .09 .24 .64 .03
        (SamplingParams(temperature=1.0, top_p=0.7), {1, 2}),
        (SamplingParams(temperature=1.0, top_k=3, top_p=0.99), {0, 1, 2}),
        (SamplingParams(temperature=1.0, top_p=1e-9), {2}),
        (SamplingParams(), {2}),
    ],
)
def test_filters_keep_what_sampling_keeps(params: SamplingParams, kept: set[int]) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(1000, 4)
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    assert set(pick(logits, params, uniform).tolist()) == kept


def test_pick_at_the_edges() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]] * 2)
    uniform = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert pick(logits, WARM, uniform).tolist() == [0, 1]
    assert pick(logits, SamplingParams(), uniform).tolist() == [0, 0]  # a tie: the lowest id
    with pytest.raises(SpdError, match="not finite"):
        pick(torch.tensor([[0.0, torch.nan]]), WARM, uniform[:1])


def test_dtype_is_the_checkpoints(make_folder: MakeFolder) -> None:
    folder = make_folder(dtype="bfloat16")
    assert load_model(folder, torch.float32).dtype == torch.float32
    assert load_model(make_folder("other")).dtype == torch.float32


def test_a_folder_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        load_model(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="cannot load"):
        load_model(tmp_path)
