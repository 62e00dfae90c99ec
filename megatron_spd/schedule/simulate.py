"""All roles in one Python process: the schedule without tensors, for tests and the planner."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_spd.errors import ScheduleError
from megatron_spd.schedule.machine import Commit, Counters, Machine, Node, Wave
from megatron_spd.schedule.trace import CycleRecord
from megatron_spd.schedule.tree import Opinion, enter_best

_REQUEST = 0


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The result of `simulate`."""

    trace: tuple[CycleRecord, ...]
    counters: Counters
    tokens: tuple[int, ...]
    """The committed tokens, the first one included."""


def simulate(
    num_stages: int,
    num_tokens: int,
    *,
    target: Callable[[int], int],
    drafter: Callable[[int], int | None],
) -> Simulation:
    """Decode `num_tokens` tokens after the first, counting cycles.

    Args:
        num_stages: n.
        num_tokens: tokens to commit behind the one at position 0.
        target: position -> the token the target chooses there, on the true text.
        drafter: position -> the token the module drafts there, or None for no draft.
    """
    machine = Machine(num_stages, num_rows=num_tokens + 3 * num_stages + 8)
    machine.admit(_REQUEST, [-1], limit=num_tokens + 2)
    _prefill(machine, target)
    tokens, trace, waves = [target(0)], list[CycleRecord](), list[Wave | None]()
    counters = machine.requests[_REQUEST].counters
    while counters.committed < num_tokens:
        waves.append(machine.emit())
        forwards = _forwards(waves, num_stages)
        drafts = _draft(machine, drafter)
        commits = _answer(machine, target)
        tokens += [commit.token for commit in commits]
        stars = tuple(f"{c.position - 1}{'' if c.accepted else '*'}" for c in commits)
        trace.append(CycleRecord(forwards=forwards, drafts=drafts, commits=stars))
        machine.check_integrity()
    machine.finish(_REQUEST)
    return Simulation(trace=tuple(trace), counters=counters, tokens=tuple(tokens))


def _prefill(machine: Machine, target: Callable[[int], int]) -> None:
    """A prompt of one token at machine position 0: the text's position p is p + 1 there."""
    while machine.requests[_REQUEST].first_wave is None:
        machine.emit()
        _answer(machine, target)


def _answer(machine: Machine, target: Callable[[int], int]) -> list[Commit]:
    wave = machine.wave_due()
    if wave is None:
        return []
    return machine.answer([target(node.position) for node in wave.nodes])


def _draft(machine: Machine, drafter: Callable[[int], int | None]) -> tuple[str, ...]:
    newest = machine.path(_REQUEST)[-1]
    token = drafter(newest.position)
    if token is None or machine.propose(newest, token) is None:
        return ()
    return (f"{newest.position}",)


def _forwards(waves: list[Wave | None], num_stages: int) -> tuple[tuple[str, ...], ...]:
    found: list[tuple[str, ...]] = []
    for stage in range(num_stages):
        wave = waves[-1 - stage] if stage < len(waves) else None
        nodes: tuple[Node, ...] = () if wave is None else wave.nodes
        found.append(tuple(_label(node) for node in nodes if node.alive))
    return tuple(found)


def _label(node: Node) -> str:
    return f"{node.position - 1}{'*' if node.corrected else ''}"


def simulate_tree(
    num_stages: int,
    num_tokens: int,
    width: int,
    *,
    agreement: Sequence[float],
    seed: int = 0,
    repairs: bool = True,
) -> Counters:
    """Decode `num_tokens` tokens with W candidates a wave and a module of a known agreement.

    The target's token is the module's first choice at a share `agreement[0]` of the positions,
    among the first two at a share `agreement[1]`, and so on, wherever they fall. Behind a wrong
    token the module has the same opinion, which is of no use. It is calibrated: it gives each place
    of its list just its chance, at every depth, so repairs here are late siblings only.

    Args:
        num_stages: n.
        num_tokens: tokens to commit behind the first.
        width: W.
        agreement: cumulative top-1, top-2, ... agreement, rising, at most 1.
        seed: of the order of the target's tokens.
        repairs: see `tree.best_first`.

    Raises:
        ScheduleError: the agreement does not rise, or leaves 0..1.
    """
    if not all(a < b for a, b in pairwise((0.0, *agreement))) or agreement[-1] > 1:
        raise ScheduleError(f"agreement is {tuple(agreement)}, expected it to rise from 0 to 1")
    opinion = [
        (place, math.log(after - before))
        for place, (before, after) in enumerate(pairwise((0.0, *agreement)))
    ]
    dice = random.Random(seed)
    # A token is its place in the module's list; the place behind the list is in no list. Every
    # place is there as often as its chance says, in a random order: less scatter than dice.
    length = num_tokens + num_stages + 4
    text = [bisect(agreement, (place + 0.5) / length) for place in range(length)]
    dice.shuffle(text)
    machine = Machine(num_stages, num_rows=num_tokens + (num_stages + 1) * (width + 3))
    machine.admit(_REQUEST, [-1], limit=len(text))
    _prefill(machine, text.__getitem__)
    counters = machine.requests[_REQUEST].counters
    opinions: dict[Node, Opinion] = {}
    while counters.committed < num_tokens:
        enter_best(machine, _REQUEST, opinions, width=width, repairs=repairs)
        wave = machine.emit()
        opinions |= dict.fromkeys(() if wave is None else wave.nodes, opinion)
        due = machine.wave_due()
        gone = () if due is None else due.nodes
        _answer(machine, text.__getitem__)
        for node in gone:
            del opinions[node]
    machine.finish(_REQUEST)
    machine.check_integrity()
    return counters
