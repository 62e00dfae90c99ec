"""Text from a whole target through transformers, in one process: many texts, or the outside oracle.

Nothing here knows stages. `write_batch` makes training data; `greedy_ids` says what another
implementation of the target would write, which is what the engine is compared with.
"""

# B rows still in the batch, P padded prompt length, V vocabulary

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, DynamicLayer
from transformers.utils import logging

from megatron_spd.errors import CheckpointError, SpdError
from megatron_spd.sampling import SamplingParams

SHRINK_BELOW = 0.75
"""Finished texts leave the batch when the others fall to this share of its rows."""


def load_model(path: str | Path, dtype: torch.dtype | None = None) -> Any:
    """The target as transformers builds it, in evaluation mode, on the GPU where there is one.

    Args:
        path: the folder; nothing is looked for elsewhere.
        dtype: of the weights; None for the checkpoint's own.

    Raises:
        CheckpointError: transformers cannot load the folder.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; expected a Hugging Face checkpoint")
    shows_bars = logging.is_progress_bar_enabled()
    # the loader's bar would tear the command's own
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto" if dtype is None else dtype, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"transformers cannot load {path}: {error}") from error
    finally:
        if shows_bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval()  # type: ignore[arg-type]


def plain_generate(
    path: str | Path, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int] = ()
) -> list[int]:
    """`greedy_ids` of one prompt, from a folder's weights in float32."""
    return greedy_ids(load_model(path, torch.float32), prompt_ids, max_new_tokens, eos_ids)


@torch.inference_mode()
def greedy_ids(
    model: Any, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int] = ()
) -> list[int]:
    """What transformers' own `generate` continues a prompt with, greedily; without the prompt.

    The text ends behind an id of `eos_ids`, after `max_new_tokens`, or at the context's end.
    """
    prompt = torch.tensor([list(prompt_ids)], device=model.device)
    room = int(model.config.max_position_embeddings) - prompt.shape[1]
    written = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=min(max_new_tokens, room),
        do_sample=False,
        eos_token_id=list(eos_ids) or None,
        pad_token_id=0,
    )
    return [int(token) for token in written[0, prompt.shape[1] :]]


@torch.inference_mode()
def write_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    limits: Sequence[int],
    eos_ids: frozenset[int],
    sampling: SamplingParams,
    number: int,
    on_token: Callable[[int, int], None] = lambda finished, tokens: None,
) -> list[list[int]]:
    """Continue prompts together; returns whole texts, prompt ids first, without padding.

    Args:
        model: from `load_model`.
        prompts: at least one token each.
        limits: length at which each text ends, prompt included.
        eos_ids: tokens that end a text; they are part of it.
        sampling: `seed` and `number` alone make the noise of this batch.
        number: which batch it is.
        on_token: told after each round how many texts are finished and how many tokens it wrote.
    """
    generator = torch.Generator().manual_seed(_noise_seed(sampling.seed, number))
    texts = [list(prompt) for prompt in prompts]
    rows = list(range(len(texts)))  # which text each row of the cache belongs to
    finished: set[int] = set()
    tokens, mask = _left_padded(prompts, model.device)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    padded = not bool(mask.all())
    cache = Cache(layer_class_to_replicate=_RoomyLayer)
    while True:
        logits = model(
            input_ids=tokens,
            attention_mask=mask if padded else None,
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        # every text has its draw in every round, so that no text's end moves another's noise
        uniform = torch.rand(len(texts), generator=generator, dtype=torch.float64)
        chosen = pick(logits, sampling, uniform[rows].to(logits.device)).tolist()
        written = [pair for pair in zip(rows, chosen, strict=True) if pair[0] not in finished]
        for text, token in written:
            texts[text].append(token)
            if token in eos_ids or len(texts[text]) >= limits[text]:
                finished.add(text)
        on_token(len(finished), len(written))
        kept = [place for place, text in enumerate(rows) if text not in finished]
        if not kept:
            return texts
        if len(kept) <= SHRINK_BELOW * len(rows):
            places = torch.tensor(kept, device=model.device)
            cache.batch_select_indices(places)
            mask, positions = mask[places], positions[places]
            rows, chosen = [rows[place] for place in kept], [chosen[place] for place in kept]
        tokens = torch.tensor(chosen, device=model.device)[:, None]
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)


def pick(logits: Tensor, sampling: SamplingParams, uniform: Tensor) -> Tensor:
    """One token a row, int64 [B], from logits [B, V].

    Temperature, then top-k, then top-p, as in `sampling.choose`; the token is where the cumulated
    chances pass `uniform`, float64 [B] in [0, 1). Greedy takes the lowest id of the largest logit.

    Raises:
        SpdError: a row's largest logit is not finite.
    """
    scores = logits.float()
    top = scores.amax(dim=1, keepdim=True)
    if not bool(torch.isfinite(top).all()):
        raise SpdError("the target gives logits that are not finite; its weights are damaged")
    if sampling.greedy:
        return (scores == top).to(torch.uint8).argmax(dim=1)
    scores = scores / sampling.temperature
    ids = None
    if sampling.filters:
        scores, ids = scores.sort(dim=1, descending=True, stable=True)
        if sampling.top_k:
            scores[:, sampling.top_k :] = -math.inf
    chances = torch.softmax(scores, dim=1)
    if sampling.top_p < 1:
        before = chances.cumsum(dim=1, dtype=torch.float64) - chances
        outside = before >= sampling.top_p
        outside[:, 0] = False  # the likeliest token stays, whatever rounding does to its chance
        chances = chances.masked_fill(outside, 0.0)
    passed = chances.cumsum(dim=1, dtype=torch.float64)
    found = torch.searchsorted(passed, uniform[:, None] * passed[:, -1:], right=True)
    return (found if ids is None else ids.gather(1, found))[:, 0]


class _RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values in memory that doubles when it is full: a token then copies nothing.

    transformers' own layer copies the whole cache for every token, most of the time of a batch.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add positions [B, heads, positions, width]; returns all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._room = [new[..., :0, :] for new in (key_states, value_states)]
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > self._room[0].shape[-2]:
            self._room = [_doubled(room, start, end) for room in self._room]
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[..., start:end, :] = new
        self.keys, self.values = (room[..., :end, :] for room in self._room)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        end = self.get_seq_length()
        self._room = [room[indices] for room in self._room]
        self.keys, self.values = (room[..., :end, :] for room in self._room)


def _doubled(room: Tensor, used: int, needed: int) -> Tensor:
    shape = (*room.shape[:2], 2 * needed, room.shape[3])
    larger = room.new_zeros(shape)
    larger[..., :used, :] = room[..., :used, :]
    return larger


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and mask, both int64 [B, P], the prompts at the right edge."""
    width = max(len(prompt) for prompt in prompts)
    tokens = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def _noise_seed(seed: int, number: int) -> int:
    """63 bits that differ for every seed and batch."""
    digest = hashlib.sha256(f"regenerate {seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
