"""The target's own loss in joint training: cross entropy of the next token, within documents."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_spd.training.data import PackedRows


def predicting(rows: PackedRows) -> Tensor:
    """Which tokens have a target, bool [B, S - 1]: the next token is of the same document."""
    documents = rows.documents
    return (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)


def count_targets(rows: PackedRows) -> int:
    """How many tokens `language_loss` is a sum over: not the first of a document, not padding."""
    return int(predicting(rows).sum())


def language_loss(
    hidden: Tensor,
    rows: PackedRows,
    logits: Callable[[Tensor], Tensor],
    chunk_tokens: int = 256,
) -> Tensor:
    """The summed cross entropy of the tokens that have a target, a float32 scalar.

    Only one chunk's logits exist at a time, in the backward pass too.

    Args:
        hidden: [B, S, H], the last boundary, un-normed.
        rows: the tokens.
        logits: [M, H] to float32 [M, V].
        chunk_tokens: tokens computed together; sets memory, not the result.
    """
    here = predicting(rows)
    sources, labels = hidden[:, :-1][here], rows.tokens[:, 1:][here]

    def chunk(source: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(logits(source).float(), label, reduction="sum")

    # The empty sum keeps the graph whole when there is no token to predict.
    total = sources[:0].float().sum()
    for source, label in zip(sources.split(chunk_tokens), labels.split(chunk_tokens), strict=True):
        if len(source):
            part: Tensor = checkpoint(chunk, source, label, use_reentrant=False)
            total = total + part
    return total
