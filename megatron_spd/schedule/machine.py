"""The schedule machine: given the answers so far, which wave enters, which nodes die or commit.

A run with three stages; the draft for position 3 is wrong:

    cycle  stage0  stage1  stage2  draft  commit
      0      0       .       .       1      .      filling
      1      1       0       .       2      .
      2      2       1       0       3      1
      3      3       2       1       4      2
      4      4       3       2       5      3*     target chose another token for 3
      5      3*      .       .       4      .      refilling behind 3*

A cycle has three moves, made by the driver in this order:

    machine.answer(tokens)    the wave that entered n cycles ago left the last stage: judge it
    machine.emit()            the next wave enters stage 0, and the cycle counts
    machine.propose(...)      the module drafted while the stages work; it enters next cycle

Rejection needs no message: nodes of a dead branch travel on as garbage, and the header of the
next wave says what its nodes may see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron_spd.errors import ScheduleError
from megatron_spd.schedule.rows import RowPool


@dataclass(kw_only=True, eq=False)
class Node:
    """One token in flight, or about to enter."""

    request: int
    position: int
    token: int
    parent: Node | None
    corrected: bool = False
    """The target chose it over a draft that was in flight, or where there was none."""
    committed: bool = False
    alive: bool = True
    row: int | None = None
    """KV row, from insertion on."""
    wave: int | None = None
    """Number of the wave that carries it; None while it waits to enter."""
    log_prob: float = 0.0
    """Log-probability the module gave it; 0 for committed tokens."""
    judged: bool = True
    """Whether the target must choose behind it; only the last token of a prompt is."""
    children: list[Node] = field(default_factory=list)

    def ancestor_rows(self) -> tuple[int, ...]:
        """Rows of the ancestors not committed yet, nearest first."""
        rows: list[int] = []
        node = self.parent
        while node is not None and not node.committed:
            if node.row is None:
                raise ScheduleError(f"position {self.position} entered before its parent")
            rows.append(node.row)
            node = node.parent
        return tuple(rows)


@dataclass(frozen=True, kw_only=True)
class Wave:
    """The nodes that enter stage 0 together, and the commits the stages have not heard of."""

    number: int
    nodes: tuple[Node, ...]
    commits: tuple[tuple[int, int], ...]
    """(row, request) pairs, applied after this wave's own rows are inserted."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The target's choice for one position."""

    request: int
    position: int
    token: int
    accepted: bool | None
    """Whether a draft had it; None when nothing was judged (no draft, or the prefill's token)."""


@dataclass(kw_only=True)
class Counters:
    """What one request cost. Drafts that died unjudged are flushed, never rejected."""

    accepted: int = 0
    rejected: int = 0
    flushed: int = 0
    committed: int = 0
    """Tokens after the first: the one that prefill yields for free counts nowhere."""
    cycles: int = 0


@dataclass(kw_only=True)
class RequestState:
    """A request inside the machine: its prompt still to enter, then a tree of nodes."""

    request: int
    prompt: deque[int]
    limit: int
    """Positions at or past it are never proposed."""
    root: Node | None = None
    """Node of the last committed token; its answer is the next commit."""
    first_wave: int | None = None
    """Wave in which the first token of the answer entered; cycles count from it."""
    next_position: int = 0
    rows: list[int] = field(default_factory=list)
    """Committed rows."""
    counters: Counters = field(default_factory=Counters)

    @property
    def prefilling(self) -> bool:
        return bool(self.prompt) or self.root is None or self.first_wave is None


class Machine:
    """The state of a pipeline of `num_stages` stages and `num_rows` KV rows.

    Args:
        num_stages: n, the cycles a wave needs to leave the last stage.
        num_rows: KV rows of every stage.
        chunk_tokens: prompt tokens that may enter in one wave.
    """

    def __init__(self, num_stages: int, num_rows: int, *, chunk_tokens: int = 64) -> None:
        self.num_stages = num_stages
        self.chunk_tokens = chunk_tokens
        self.rows = RowPool(num_rows)
        self.cycle = 0
        self.requests: dict[int, RequestState] = {}
        self._travelling: deque[Wave] = deque()
        self._waiting: list[Node] = []
        self._commits: list[tuple[int, int]] = []

    # ---- the three moves of a cycle

    def wave_due(self) -> Wave | None:
        """The wave whose answer this cycle begins with, if one entered n cycles ago."""
        if self._travelling and self._travelling[0].number == self.cycle - self.num_stages:
            return self._travelling[0]
        return None

    def answer(self, tokens: Sequence[int]) -> list[Commit]:
        """Judge the wave that is due.

        Args:
            tokens: the target's choice behind each node of the wave, in the wave's order.
        """
        wave = self.wave_due()
        if wave is None or len(tokens) != len(wave.nodes):
            expected = "no wave" if wave is None else f"{len(wave.nodes)} tokens"
            raise ScheduleError(f"{expected} due at cycle {self.cycle}, got {len(tokens)} tokens")
        self._travelling.popleft()
        commits: list[Commit] = []
        for node, token in zip(wave.nodes, tokens, strict=True):
            state = self.requests.get(node.request)
            if state is not None and state.root is node and not state.prompt:
                commits.append(self._judge(state, node, token))
        for node in wave.nodes:
            if not node.alive and node.row is not None:
                self.rows.release(node.row)
        return commits

    def emit(self) -> Wave | None:
        """The wave that enters stage 0 in this cycle; None when nothing is ready to enter."""
        nodes = [node for node in self._waiting if node.alive] + list(self._prompt_nodes())
        self._waiting.clear()
        for node in nodes:
            self._insert(node)
        number, self.cycle = self.cycle, self.cycle + 1
        if not nodes:
            return None
        wave = Wave(number=number, nodes=tuple(nodes), commits=tuple(self._commits))
        self._commits.clear()
        self._travelling.append(wave)
        return wave

    def propose(self, parent: Node, token: int, *, log_prob: float = 0.0) -> Node | None:
        """A draft behind `parent`, to enter with the next wave; None past the request's limit."""
        state = self.requests.get(parent.request)
        if state is None or not parent.alive or parent.position + 1 >= state.limit:
            return None
        node = Node(
            request=parent.request,
            position=parent.position + 1,
            token=token,
            parent=parent,
            log_prob=log_prob,
        )
        parent.children.append(node)
        self._waiting.append(node)
        return node

    # ---- requests

    def admit(self, request: int, prompt: Sequence[int], *, limit: int) -> None:
        """A prompt of at least one token, to enter in chunks from the next wave on."""
        if request in self.requests or not prompt:
            raise ScheduleError(f"request {request} is admitted already, or its prompt is empty")
        self.requests[request] = RequestState(request=request, prompt=deque(prompt), limit=limit)

    def finish(self, request: int) -> Counters:
        """Forget a request at any cycle: what is in flight travels on as garbage."""
        state = self.requests.pop(request)
        if state.root is not None:
            self._flush(state, state.root)
            state.root.alive = False
        travelling = {n.row for w in self._travelling for n in w.nodes if n.request == request}
        for row in state.rows:
            if row not in travelling:
                self.rows.release(row)
        for wave in self._travelling:
            for node in wave.nodes:
                if node.request == request:
                    node.alive = False
        self._commits = [pair for pair in self._commits if pair[1] != request]
        self._waiting = [node for node in self._waiting if node.request != request]
        return state.counters

    def path(self, request: int) -> list[Node]:
        """The nodes from the root to the newest, following first children; root first."""
        node = self.requests[request].root
        found: list[Node] = []
        while node is not None:
            found.append(node)
            alive = [child for child in node.children if child.alive]
            node = alive[0] if alive else None
        return found

    @property
    def busy(self) -> bool:
        """Whether any wave travels or any request is open."""
        return bool(self._travelling or self.requests)

    def check_integrity(self) -> None:
        """Raise ScheduleError unless rows add up and each tree hangs on its root."""
        self.rows.check_integrity()
        for wave in self._travelling:
            for node in wave.nodes:
                state = self.requests.get(node.request)
                if state is None or not node.alive or node.committed:
                    continue
                above = node
                while above is not state.root and above.parent is not None:
                    above = above.parent
                if above is not state.root:
                    raise ScheduleError(f"position {node.position} hangs on no committed token")

    # ---- inside

    def _judge(self, state: RequestState, root: Node, token: int) -> Commit:
        counters, children = state.counters, [c for c in root.children if c.alive]
        free = state.first_wave is None
        chosen = next((child for child in children if child.token == token), None)
        accepted = None if not children else chosen is not None
        for child in children:
            if child is not chosen:
                child.alive = False
                self._flush(state, child)
        if accepted is not None:
            counters.accepted += accepted
            counters.rejected += not accepted
            counters.flushed += len(children) - 1
        if chosen is None:
            chosen = Node(
                request=root.request,
                position=root.position + 1,
                token=token,
                parent=None,
                corrected=not free,
            )
            self._waiting.append(chosen)
        if free:
            state.first_wave = self.cycle
        else:
            counters.committed += 1
            counters.cycles = self.cycle - state.first_wave if state.first_wave is not None else 0
        chosen.committed, chosen.parent, state.root = True, None, chosen
        if chosen.row is not None:
            self._commit_row(state, chosen.row)
        return Commit(
            request=root.request, position=chosen.position, token=token, accepted=accepted
        )

    def _flush(self, state: RequestState, node: Node) -> None:
        """Everything below `node` dies unjudged."""
        for child in node.children:
            if child.alive:
                child.alive = False
                state.counters.flushed += 1
                self._flush(state, child)

    def _prompt_nodes(self) -> Iterator[Node]:
        room = self.chunk_tokens
        for state in self.requests.values():
            while state.prompt and room:
                room -= 1
                token = state.prompt.popleft()
                node = Node(
                    request=state.request,
                    position=state.next_position,
                    token=token,
                    parent=None,
                    committed=True,
                    judged=not state.prompt,
                )
                state.next_position += 1
                state.root = node
                yield node

    def _insert(self, node: Node) -> None:
        node.row, node.wave = self.rows.take(), self.cycle
        if node.committed:
            self._commit_row(self.requests[node.request], node.row)

    def _commit_row(self, state: RequestState, row: int) -> None:
        self.rows.commit(row)
        self._commits.append((row, state.request))
        state.rows.append(row)
