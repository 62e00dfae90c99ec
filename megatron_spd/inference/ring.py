"""The raw hop: bare messages of the engine's sizes, once around the engine's ranks."""

from __future__ import annotations

import time

import torch

from megatron_spd import comm
from megatron_spd.comm import Channel
from megatron_spd.stage_plan import StagePlan
from megatron_spd.wave import WaveFormat

_RING = 5


def ring_edges(plan: StagePlan) -> list[tuple[int, int]]:
    """(from, to) ranks from the driver through all stages and back; none from a rank to itself."""
    stops = [plan.module_rank, *plan.stage_ranks, plan.module_rank]
    return [(a, b) for a, b in zip(stops, stops[1:], strict=False) if a != b]


def measure_ring(plan: StagePlan, wire: WaveFormat, rounds: int) -> list[float] | None:
    """Send one wave's bytes around the ring `rounds` times; every rank of the plan must call it.

    A round is what a token needs besides the stages' work: a wave's message on each edge and, on
    the one that leads back to the driver, the int64 of one chosen token. As in the engine, each
    receive is posted before its message exists, and nothing is packed or read.

    Returns the seconds of each round on the module's rank, None on the others.

    Raises:
        CommError: a rank was lost.
    """
    rank, edges = comm.current_world().rank, ring_edges(plan)
    sizes = [wire.message_bytes] * len(edges)
    if plan.module_rank != plan.stage_ranks[-1]:
        sizes[-1] = torch.int64.itemsize
    mine = [(place, edge) for place, edge in enumerate(edges) if rank in edge]
    channels = {place: Channel(b if a == rank else a, _RING) for place, (a, b) in mine}
    messages = {place: torch.zeros(sizes[place], dtype=torch.uint8) for place, _ in mine}
    incoming = [place for place, (_, receiver) in mine if receiver == rank]
    posted = {place: channels[place].post_receive(sizes[place]) for place in incoming}
    seconds: list[float] = []
    for left in reversed(range(rounds)):
        started = time.perf_counter()
        for place, (sender, _) in mine:
            if sender == rank:
                channels[place].send(messages[place])
                continue
            posted[place].wait()
            if left:
                posted[place] = channels[place].post_receive(sizes[place])
        seconds.append(time.perf_counter() - started)
    for channel in channels.values():
        channel.flush()
    return seconds if rank == plan.module_rank else None
