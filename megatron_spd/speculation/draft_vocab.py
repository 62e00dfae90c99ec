"""Which of the target's tokens the module can draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_spd.errors import ConfigError


def choose_draft_ids(
    counts: Sequence[int] | Tensor, size: int, must_have: Iterable[int], vocab_size: int
) -> Tensor:
    """The must-have ids and the most frequent others, ties to the lowest id.

    Args:
        counts: occurrences of each token, [vocab_size].
        size: ids to choose.
        must_have: EOS, specials and byte tokens.
        vocab_size: the target's vocabulary.

    Returns:
        int64 [size], ascending.

    Raises:
        ConfigError: sizes or ids that do not fit.
    """
    seen = torch.as_tensor(counts, dtype=torch.int64).cpu()
    needed = sorted(set(must_have))
    if seen.shape != (vocab_size,):
        raise ConfigError(f"counts has shape {tuple(seen.shape)}, expected ({vocab_size},)")
    if not 1 <= size <= vocab_size:
        raise ConfigError(f"a draft vocabulary of {size} does not fit 1..{vocab_size}")
    if needed and not 0 <= needed[0] <= needed[-1] < vocab_size:
        raise ConfigError(f"must-have ids {needed[0]}..{needed[-1]} leave 0..{vocab_size - 1}")
    if len(needed) > size:
        raise ConfigError(f"{len(needed)} must-have ids exceed the draft vocabulary of {size}")
    kept = torch.zeros(vocab_size, dtype=torch.bool)
    kept[torch.tensor(needed, dtype=torch.int64)] = True
    order = torch.argsort(seen, descending=True, stable=True)
    others = order[~kept[order]][: size - len(needed)]
    kept[others] = True
    return kept.nonzero().flatten()


def check_draft_ids(draft_ids: Tensor, size: int, vocab_size: int) -> Tensor:
    """The ids as int64 [size], in the order given (any order is allowed).

    Raises:
        ConfigError: a wrong count, a duplicate, or an id outside the vocabulary.
    """
    ids = draft_ids.to(torch.int64)
    if ids.shape != (size,):
        raise ConfigError(f"draft ids have shape {tuple(ids.shape)}, expected ({size},)")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ConfigError(
            f"draft ids span {int(ids.min())}..{int(ids.max())}, vocab_size is {vocab_size}"
        )
    if ids.unique().numel() != size:
        raise ConfigError(f"draft ids repeat: {ids.unique().numel()} distinct of {size}")
    return ids
