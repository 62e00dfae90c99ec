"""Who proposes the next token: the speculation module, or a script that stands in for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_spd.errors import ScheduleError
from megatron_spd.kv_rows import KvRows
from megatron_spd.sampling import SamplingParams, candidates
from megatron_spd.schedule.depths import depth_of
from megatron_spd.schedule.machine import Machine, Node
from megatron_spd.speculation.module import SpeculationModule
from megatron_spd.stage_plan import StagePlan


class Drafter(Protocol):
    """What the driver asks of a drafter, once a cycle."""

    def observe(self, nodes: Sequence[Node], stage: int, taps: Tensor | None) -> None:
        """A wave's nodes have completed a stage, which gave taps [T, N, H]."""
        ...

    def propose(self, machine: Machine, request: int, sampling: SamplingParams) -> None:
        """Work while the stages work: propose tokens of a request, or prepare to."""
        ...

    def enter(self, machine: Machine, request: int) -> None:
        """Propose what enters right now: the answers of the cycle are known, its wave is next."""
        ...

    def forget(self, request: int) -> None:
        """A request is over."""
        ...


class SilentDrafter:
    """Never drafts: plain decoding over the pipeline, n cycles a token."""

    def observe(self, nodes: Sequence[Node], stage: int, taps: Tensor | None) -> None:
        """No taps are read."""

    def propose(self, machine: Machine, request: int, sampling: SamplingParams) -> None:
        """Nothing is proposed."""

    def enter(self, machine: Machine, request: int) -> None:
        """Nothing is proposed."""

    def forget(self, request: int) -> None:
        """Nothing is kept."""


class ScriptedDrafter:
    """Drafts from the known text: ORACLE is right always, WRONG never, RANDOM(p) with chance p.

    Args:
        right_share: chance of proposing the true token, 1.0 for ORACLE and 0.0 for WRONG.
        vocab_size: a wrong token is the true one plus one, modulo this.
        seed: of the coin.
    """

    def __init__(self, right_share: float, *, vocab_size: int, seed: int = 0) -> None:
        self.right_share, self._vocab = right_share, vocab_size
        self._coin = random.Random(seed)
        self.text: Mapping[int, int] = {}
        """Position -> token of the text to come; set it before each request."""

    def observe(self, nodes: Sequence[Node], stage: int, taps: Tensor | None) -> None:
        """A script reads no taps."""

    def propose(self, machine: Machine, request: int, sampling: SamplingParams) -> None:
        """The scripted token behind the newest node."""
        newest = machine.path(request)[-1]
        true = self.text.get(newest.position + 1)
        if true is None:
            return
        right = self._coin.random() < self.right_share
        machine.propose(newest, true if right else (true + 1) % self._vocab)

    def enter(self, machine: Machine, request: int) -> None:
        """All was proposed before."""

    def forget(self, request: int) -> None:
        """A script keeps nothing of a request."""


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """The rows of one draft, as the module read them; what tests compare with training."""

    newest: Node
    path: tuple[Node, ...]
    features: Tensor  # [F, H], root first
    depths: tuple[int, ...]
    logits: Tensor  # [Vd] of the newest row


class ModuleDrafter:
    """Drafts with the speculation module, over KV rows of its own that mirror the stages'.

    A node's row in the module's pool first holds what the module makes of its shallow features,
    rewritten each cycle; when the node has left the pipeline the row is written once more from
    the deepest features and committed.

    Args:
        plan: the stage plan.
        module: the speculation module, in evaluation mode.
        embedding: the target's embedding [V, H], for boundary 0.
        kv: rows for the module's layers, as many as a stage has.
    """

    def __init__(
        self, plan: StagePlan, module: SpeculationModule, embedding: Tensor, kv: KvRows
    ) -> None:
        self._plan, self._module, self._embedding, self._kv = plan, module, embedding, kv
        self._taps: dict[Node, Tensor] = {}
        self._complete: dict[int, list[Node]] = {}
        self.on_rows: Callable[[DraftRows], None] | None = None

    @torch.inference_mode()
    def observe(self, nodes: Sequence[Node], stage: int, taps: Tensor | None) -> None:
        """Keep the taps of live nodes; a node that completed the last stage gets its row."""
        boundaries = [self._plan.taps.index(tap) for tap in self._plan.taps_of(stage)]
        for place, node in enumerate(nodes):
            if not node.alive:
                self._taps.pop(node, None)
                continue
            if taps is not None:
                self._node_taps(node)[boundaries] = taps[:, place].to(self._embedding.dtype)
            if stage == self._plan.num_stages - 1:
                self._complete.setdefault(node.request, []).append(node)

    @torch.inference_mode()
    def propose(self, machine: Machine, request: int, sampling: SamplingParams) -> None:
        """Forward the rows of this moment and propose the best candidate."""
        path = machine.path(request)
        newest = path[-1]
        if newest.position + 1 >= machine.requests[request].limit:
            return
        complete = [n for n in self._complete.pop(request, []) if n.alive]
        features, depths = self._features(machine, path)
        deepest = [self._feature(node, self._plan.num_stages) for node in complete]
        above = [tuple(path[:place]) for place in range(len(path))]
        hidden = self._forward(complete, path, torch.stack([*deepest, *features]), above)
        logits = self._module.logits(hidden[-1])
        if self.on_rows is not None:
            rows = torch.stack(features)
            self.on_rows(
                DraftRows(
                    newest=newest, path=tuple(path), features=rows, depths=depths, logits=logits
                )
            )
        for node in complete:
            self._taps.pop(node, None)
        ids, log_probs = candidates(
            logits, self._module.draft_ids, sampling, newest.position + 1, 1
        )
        machine.propose(newest, int(ids[0]), log_prob=float(log_probs[0]))

    def enter(self, machine: Machine, request: int) -> None:
        """All was proposed before."""

    def forget(self, request: int) -> None:
        """Drop what is kept of a request."""
        self._complete.pop(request, None)
        for node in [node for node in self._taps if node.request == request]:
            del self._taps[node]

    def _features(
        self, machine: Machine, path: Sequence[Node]
    ) -> tuple[list[Tensor], tuple[int, ...]]:
        """Features of the nodes in flight, root first, each at the depth it has now."""
        fill = len(path)
        depths = tuple(
            depth_of(fill - 1 - place, fill, self._plan.num_stages) for place in range(fill)
        )
        features: list[Tensor] = []
        for node, depth in zip(path, depths, strict=True):
            if node.wave is None or machine.cycle - 1 - node.wave != depth:
                raise ScheduleError(
                    f"position {node.position} should have depth {depth} in cycle "
                    f"{machine.cycle - 1}, it entered in {node.wave}"
                )
            features.append(self._feature(node, depth))
        return features, depths

    def _feature(self, node: Node, depth: int) -> Tensor:
        return self._module.features(self._node_taps(node), depth)

    def _node_taps(self, node: Node) -> Tensor:
        taps = self._taps.get(node)
        if taps is None:
            width = self._embedding.shape[1]
            taps = self._embedding.new_zeros(len(self._plan.taps), width)
            taps[0] = self._embedding[node.token]
            self._taps[node] = taps
        return taps

    def _forward(
        self,
        complete: Sequence[Node],
        live: Sequence[Node],
        features: Tensor,
        above: Sequence[Sequence[Node]],
    ) -> Tensor:
        """Write the rows of nodes and return what the layers make of them, [C + M, H].

        Args:
            complete: C nodes that left the pipeline; they are committed here, for good.
            live: M nodes in flight.
            features: [C + M, H].
            above: of each live node its ancestors in flight; all of them are in `live`.
        """
        nodes = [*complete, *live]
        rows = torch.tensor([-1 if node.row is None else node.row for node in nodes])
        positions = torch.tensor([node.position for node in nodes])
        requests = torch.tensor([node.request for node in nodes])
        self._kv.insert(rows, positions)
        if complete:
            done = len(complete)
            self._kv.commit(rows[:done], requests[:done])
        width = max((len(found) for found in above), default=0)
        ancestors = [[-1] * width for _ in complete]
        for found in above:
            named = [-1 if node.row is None else node.row for node in found]
            ancestors.append([*named, *[-1] * (width - len(named))])
        seen = torch.tensor(ancestors, dtype=torch.int64).view(len(nodes), width)
        visible = self._kv.visible(rows, requests, positions, seen)
        return self._module.forward_rows(features, positions, visible, rows, self._kv)
