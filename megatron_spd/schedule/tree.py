"""Which candidates of a request's tree enter next: the most probable ones not entered yet.

A live node's *opinion* is the module's short list of tokens that may follow it, each with its
log-probability. Opinions are renewed every cycle, from deeper features the longer the node has
travelled. The probability of a path is the product of the newest opinions along it from the root,
which is committed and has 1, so a renewed opinion changes what every node behind it is worth.

    opinion of A: b .8, c .1          A --- B --- D      entered
    opinion of B: d .3, e .6           \\
    opinion of D: f .9                  C                not entered: c .1, e .48, f .24 * .9

Here e enters first: B's opinion has turned against D, and E is a *repair*, a late sibling of D.

Choose between a cycle's judgement and its wave (`Machine.answer` and `Machine.emit`), when the
root is the newest committed token: a budget spent before the judgement goes partly to branches
that it kills. With W = 1 on one chain both times are the same.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from megatron_spd.schedule.machine import Machine, Node

Opinion = Sequence[tuple[int, float]]
"""(token, log-probability) of what may stand behind a node; tokens differ, any order."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A token that could enter behind a node."""

    parent: Node
    token: int
    log_prob: float
    """Of the whole path from the root to the token."""


def best_first(
    root: Node,
    opinions: Mapping[Node, Opinion],
    *,
    width: int,
    repairs: bool = True,
    limit: int | None = None,
) -> list[Candidate]:
    """The at most `width` most probable candidates of a request, best first.

    On the way every live node's `log_prob` is set from the newest opinions; the root's is 0. A
    token in flight that its parent's opinion no longer names gets the smallest log-probability that
    is named there, which is at least its own. Behind a node without an opinion nothing new is
    known: what one token adds to the path stays as it was, and nothing enters.

    A token that is already a live child of a node is no candidate behind it. Of equally probable
    ones the node nearer to the root goes first, then the order of the opinion.

    Args:
        root: the node of the last committed token, `RequestState.root`.
        opinions: of live nodes that have entered.
        width: W, the nodes that may enter.
        repairs: whether a node that has a child in flight may get another one. Without repairs a
            node's candidates enter together or not at all: only leaves grow.
        limit: positions at or past it are no candidates.
    """
    found: list[tuple[float, Node, int]] = []
    last = math.inf if limit is None else limit - 2
    before, root.log_prob = root.log_prob, 0.0
    live = [(root, before)]
    for node, was in live:  # grows while it is read
        opinion = opinions.get(node, ())
        entered = node.children and _renew_children(node, was, opinion, live)
        if node.position > last or (entered and not repairs) or node.wave is None:
            continue
        path = node.log_prob
        found += [
            (path + log_prob, node, token)
            for token, log_prob in opinion
            if not entered or token not in entered
        ]
    best = heapq.nlargest(width, found, key=itemgetter(0))
    return [
        Candidate(parent=node, token=token, log_prob=path)
        for path, node, token in best
        if path > -math.inf
    ]


def _renew_children(
    node: Node, was: float, opinion: Opinion, live: list[tuple[Node, float]]
) -> list[int]:
    """Set the paths of a node's children and append them to `live`; returns their tokens.

    Args:
        was: the node's own path before it was renewed.
    """
    named = dict(opinion)
    floor = min(named.values()) if named else None
    tokens: list[int] = []
    for child in node.children:
        if child.alive:
            old = child.log_prob
            step = min(old - was, 0.0) if floor is None else named.get(child.token, floor)
            child.log_prob = node.log_prob + step
            live.append((child, old))
            tokens.append(child.token)
    return tokens


def enter_best(
    machine: Machine,
    request: int,
    opinions: Mapping[Node, Opinion],
    *,
    width: int,
    repairs: bool = True,
) -> list[Node]:
    """Propose a request's best candidates (`best_first`); they enter with the next wave.

    Nothing enters behind a root that has not entered itself: it was corrected in this cycle.
    """
    state = machine.requests[request]
    if state.root is None or state.prefilling:
        return []
    chosen = best_first(state.root, opinions, width=width, repairs=repairs, limit=state.limit)
    nodes = [machine.propose(c.parent, c.token, log_prob=c.log_prob) for c in chosen]
    return [node for node in nodes if node is not None]
