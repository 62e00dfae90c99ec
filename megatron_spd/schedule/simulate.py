"""All roles in one Python process: the schedule without tensors, for tests and the planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_spd.schedule.machine import Commit, Counters, Machine, Node, Wave
from megatron_spd.schedule.trace import CycleRecord

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
