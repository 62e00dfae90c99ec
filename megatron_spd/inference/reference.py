"""Plain decoding in one process: the oracle every other way of decoding must equal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from megatron_spd.inference.requests import Request, Result, TextEnd
from megatron_spd.inference.stage_worker import StageCompute
from megatron_spd.schedule.machine import Counters
from megatron_spd.wave import WaveHeader


def decode_plain(
    stages: Sequence[StageCompute],
    request: Request,
    *,
    max_positions: int,
    decode: Callable[[Sequence[int]], str],
    request_id: int = 0,
) -> Result:
    """Continue one prompt a token at a time through all stages in turn.

    The rows of the stages' KV pools are used from 0 on, so no other request may live in them;
    a request id must not be used twice on the same pools.
    """
    end = TextEnd(request, request.limit(max_positions), decode)
    started = time.perf_counter()
    token = _forward(stages, request, request_id, request.prompt_ids, first=0)
    while not end.add(token):
        position = len(request.prompt_ids) + len(end.ids) - 1
        token = _forward(stages, request, request_id, (token,), first=position)
    tokens_after_first = len(end.ids) - 1
    return Result(
        ids=tuple(end.ids),
        text=end.text(),
        finish_reason=end.reason or "length",
        counters=Counters(committed=tokens_after_first, cycles=tokens_after_first),
        seconds=time.perf_counter() - started,
        num_stages=1,
    )


def _forward(
    stages: Sequence[StageCompute],
    request: Request,
    request_id: int,
    tokens: Sequence[int],
    *,
    first: int,
) -> int:
    """Forward tokens at positions first.. and return the target's choice behind the last."""
    rows = tuple(range(first, first + len(tokens)))
    header = WaveHeader(
        number=first,
        tokens=tuple(tokens),
        positions=rows,
        rows=rows,
        requests=(request_id,) * len(tokens),
        judged=(False,) * (len(tokens) - 1) + (True,),
        ancestors=((),) * len(tokens),
        commits=tuple((row, request_id) for row in rows),
        sampling=((request_id, request.sampling),),
    )
    hidden = None
    for stage in stages:
        result = stage.step(header, hidden)
        hidden = result.hidden
    if result.tokens is None:
        raise AssertionError("the last stage chose no token")
    return int(result.tokens[-1])
