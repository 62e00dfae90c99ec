"""A tree of drafts: every live node has an opinion, renewed each cycle, and the best W enter."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_spd.errors import ConfigError
from megatron_spd.inference.drafter import ModuleDrafter
from megatron_spd.kv_rows import KvRows
from megatron_spd.sampling import SamplingParams, draft_scores, gumbel
from megatron_spd.schedule.machine import Machine, Node
from megatron_spd.schedule.tree import Opinion, enter_best
from megatron_spd.speculation.module import SpeculationModule
from megatron_spd.stage_plan import StagePlan

SPREAD = 0.4
"""Scale of the Gumbel errors between the module's scores and the target's.

By the likelihood of the target's choices the best scale was 0.25 to 0.4 for one small trained
module and about 0.9 for another; on the texts they decoded with W = 4, of 0.15 to 1, this gave the
most tokens a cycle or nearly so, greedy and at T = 1, and 1 up to 14 % fewer.
"""


def live_tree(root: Node) -> list[Node]:
    """The root and every live node behind it, parents first."""
    found = [root]
    for node in found:  # grows while it is read
        found += [child for child in node.children if child.alive]
    return found


class TreeDrafter(ModuleDrafter):
    """Drafts a tree with the speculation module: W nodes a wave, late siblings and repairs.

    While the stages work, the rows of all live nodes are forwarded, each at the depth it has now
    and seeing its own branch, and the head gives each an opinion of the token behind it. When the
    answers have come the most probable candidates enter (`schedule/tree.py`).

    An opinion ranks tokens by `logits / T + g`, with the noise g that the target will choose with.
    Given g the chance of a token is no longer the module's probability. It is taken as
    `softmax((logits / T + g) / spread)`: just the chance that the target's score of the token is
    the largest, if its scores are the module's plus Gumbel errors of that scale. Greedy, g = 0.

    With W = 1 and no repairs nothing is to be chosen: it is a `ModuleDrafter` then.

    Args:
        plan: the stage plan.
        module: the speculation module, in evaluation mode.
        embedding: the target's embedding [V, H], for boundary 0.
        kv: rows for the module's layers, as many as a stage has.
        width: W.
        repairs: see `tree.best_first`.
        spread: scale of the errors, more than 0.

    Raises:
        ConfigError: a width below 1 or a spread that is not positive.
    """

    def __init__(
        self,
        plan: StagePlan,
        module: SpeculationModule,
        embedding: Tensor,
        kv: KvRows,
        *,
        width: int,
        repairs: bool,
        spread: float = SPREAD,
    ) -> None:
        if width < 1 or not spread > 0:
            raise ConfigError(
                f"width is {width} and spread {spread}, expected at least 1 and more than 0"
            )
        super().__init__(plan, module, embedding, kv)
        self.width, self.repairs, self._spread = width, repairs, spread
        self._opinions: dict[int, dict[Node, Opinion]] = {}
        self._noise: dict[int, dict[int, Tensor]] = {}
        self._head_row = torch.full((module.config.vocab_size,), -1, dtype=torch.int64)
        self._head_row[module.draft_ids] = torch.arange(len(module.draft_ids))

    @property
    def _is_chain(self) -> bool:
        return self.width == 1 and not self.repairs

    @torch.inference_mode()
    def propose(self, machine: Machine, request: int, sampling: SamplingParams) -> None:
        """Forward the rows of all live nodes and renew their opinions; a chain's draft enters."""
        if self._is_chain:
            super().propose(machine, request, sampling)
            return
        state = machine.requests[request]
        if state.root is None or state.root.position + 1 >= state.limit:
            return
        live = live_tree(state.root)
        complete = [node for node in self._complete.pop(request, []) if node.alive]
        depths = [self._depth(machine, node) for node in live]
        features = self._batched(
            [*complete, *live], [self._plan.num_stages] * len(complete) + depths
        )
        hidden = self._forward(complete, live, features, _branches(live))
        for node in complete:
            self._taps.pop(node, None)
        logits = self._module.logits(hidden[len(complete) :])
        self._opinions[request] = self._judge(live, logits, sampling)

    def enter(self, machine: Machine, request: int) -> None:
        """The best candidates enter; opinions of nodes that died meanwhile are not asked."""
        opinions = self._opinions.pop(request, None)
        if opinions is not None:
            enter_best(machine, request, opinions, width=self.width, repairs=self.repairs)

    def forget(self, request: int) -> None:
        """Drop what is kept of a request."""
        super().forget(request)
        self._opinions.pop(request, None)
        self._noise.pop(request, None)

    def _depth(self, machine: Machine, node: Node) -> int:
        """Stages that a node has completed: the deepest of what is known of it."""
        if node.wave is None:
            raise AssertionError(f"position {node.position} has not entered")
        return machine.cycle - 1 - node.wave

    def _batched(self, nodes: Sequence[Node], depths: Sequence[int]) -> Tensor:
        """Features [N, H] of nodes at their depths, one call a depth."""
        taps = torch.stack([self._node_taps(node) for node in nodes])
        features = taps.new_empty(len(nodes), taps.shape[-1])
        for depth in set(depths):
            places = torch.tensor([place for place, d in enumerate(depths) if d == depth])
            features[places] = self._module.features(taps[places], depth)
        return features

    def _judge(
        self, live: Sequence[Node], logits: Tensor, sampling: SamplingParams
    ) -> dict[Node, Opinion]:
        """The opinion of each live node: enough of the best tokens, and all its live children's."""
        ids = self._module.draft_ids
        noise = None if sampling.greedy else self._noise_of(live, sampling)
        scores = draft_scores(logits, ids, sampling, noise)
        chances = torch.log_softmax(scores / self._spread, dim=1)
        children = [[c.token for c in node.children if c.alive] for node in live]
        count = min(self.width + max(map(len, children)), len(ids))
        best = torch.topk(scores, count, dim=1).indices
        tokens, log_probs = ids[best].tolist(), chances.gather(1, best).tolist()
        opinions: dict[Node, Opinion] = {}
        for place, node in enumerate(live):
            opinion = dict(zip(tokens[place], log_probs[place], strict=True))
            for token in children[place]:
                if token not in opinion:
                    opinion[token] = float(chances[place, self._head_row[token]])
            opinions[node] = list(opinion.items())
        return opinions

    def _noise_of(self, live: Sequence[Node], sampling: SamplingParams) -> Tensor:
        """The target's noise [M, Vd] for the position behind each live node, drawn once each."""
        request, ids = live[0].request, self._module.draft_ids
        asked, known = {node.position + 1 for node in live}, self._noise.get(request, {})
        new = sorted(asked - known.keys())
        drawn = gumbel(sampling.seed, torch.tensor(new, dtype=torch.int64), ids)
        kept = {position: row for position, row in known.items() if position in asked}
        self._noise[request] = kept | dict(zip(new, drawn, strict=True))
        return torch.stack([self._noise[request][node.position + 1] for node in live])


def _branches(live: Sequence[Node]) -> list[tuple[Node, ...]]:
    """Of each node of a live tree, parents first, its ancestors in the tree."""
    branches: dict[Node, tuple[Node, ...]] = {}
    for node in live:
        parent = node.parent
        branches[node] = () if parent is None else (*branches[parent], parent)
    return list(branches.values())


class ScriptedTreeDrafter:
    """Drafts at random places of the tree, from the known text: any policy there could be.

    Each cycle up to W drafts enter, some before the answers and some after. One of them is the true
    token behind a node of the true branch with chance `right_share`; the others are wrong.

    Args:
        right_share: the chance.
        width: W.
        repairs: whether nodes with a child in flight get drafts.
        vocab_size: tokens are below it.
        seed: of the dice.
    """

    def __init__(
        self, right_share: float, *, width: int, repairs: bool, vocab_size: int, seed: int = 0
    ) -> None:
        self.right_share, self.width, self.repairs = right_share, width, repairs
        self._vocab, self._dice = vocab_size, random.Random(seed)
        self._left = 0
        self.text: Mapping[int, int] = {}
        """Position -> token of the text to come; set it before each request."""

    def observe(self, nodes: Sequence[Node], stage: int, taps: Tensor | None) -> None:
        """A script reads no taps."""

    def propose(self, machine: Machine, request: int, sampling: SamplingParams) -> None:
        """Some of the drafts."""
        early = self._dice.randint(0, self.width)
        self._left = self.width - early
        self._draft(machine, request, early)

    def enter(self, machine: Machine, request: int) -> None:
        """The other drafts."""
        self._draft(machine, request, self._left)
        self._left = 0

    def forget(self, request: int) -> None:
        """A script keeps nothing of a request."""

    def _draft(self, machine: Machine, request: int, count: int) -> None:
        root = machine.requests[request].root
        if root is None or not count:
            return
        live = [node for node in live_tree(root) if node.wave is not None]
        true = [root] if root.wave is not None else []
        for node in live:
            if node.parent in true and node.token == self.text.get(node.position):
                true.append(node)
        open_to = [node for node in live if self.repairs or not node.children]
        lacking = [
            node
            for node in true
            if node in open_to
            and self.text.get(node.position + 1) not in [c.token for c in node.children]
        ]
        if lacking and self._dice.random() < self.right_share:
            parent = self._dice.choice(lacking)
            if parent.position + 1 in self.text:
                machine.propose(parent, self.text[parent.position + 1])
                count -= 1
        for _ in range(count if open_to else 0):
            parent = self._dice.choice(open_to)
            taken = {child.token for child in parent.children}
            token = self._dice.randrange(self._vocab)
            if token not in taken and token != self.text.get(parent.position + 1):
                machine.propose(parent, token)
