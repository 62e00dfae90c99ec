"""The tree drafter's opinions: what candidates there are, what chance they get, whose branch."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_spd.errors import ConfigError
from megatron_spd.inference.tree_drafter import TreeDrafter, _branches, live_tree
from megatron_spd.kv_rows import KvRows
from megatron_spd.sampling import SamplingParams, candidates, gumbel
from megatron_spd.schedule.machine import Node
from megatron_spd.speculation.config import ModuleConfig
from megatron_spd.speculation.module import SpeculationModule
from megatron_spd.stage_plan import StagePlan
from megatron_spd.target_spec import RopeSpec

PLAN = StagePlan.from_bounds((0, 1, 2, 3))
VOCAB = 50
DRAFT_IDS = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:40]
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.7, top_k=9, top_p=0.8, seed=7),
)


def drafter(width: int, *, repairs: bool = True, spread: float = 1.0) -> TreeDrafter:
    config = ModuleConfig(
        hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=8,
        vocab_size=VOCAB, norm_eps=1e-5, rope=RopeSpec(rope_type="default", theta=10000.0),
        num_layers=1, aggregator="shared", head="linear", draft_vocab_size=len(DRAFT_IDS),
        bounds=PLAN.bounds, taps=PLAN.taps,
    )  # fmt: skip
    module = SpeculationModule(config, PLAN, DRAFT_IDS)
    kv = KvRows(1, 16, 1, 4, torch.float32)
    return TreeDrafter(
        PLAN, module, torch.zeros(VOCAB, 8), kv, width=width, repairs=repairs, spread=spread
    )


def child_of(parent: Node | None, token: int) -> Node:
    position = 5 if parent is None else parent.position + 1
    node = Node(request=0, position=position, token=token, parent=parent)
    if parent is not None:
        parent.children.append(node)
    return node


def logits_of(rows: int) -> Tensor:
    return torch.randn(rows, len(DRAFT_IDS), generator=torch.Generator().manual_seed(1)) * 2


def tokens_of(opinion: Sequence[tuple[int, float]]) -> list[int]:
    return [token for token, _ in opinion]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("width", [1, 3])
def test_the_best_of_an_opinion_are_the_candidates_of_that_position(
    sampling: SamplingParams, width: int
) -> None:
    root = child_of(None, 1)
    first, second = child_of(root, int(DRAFT_IDS[0])), child_of(root, int(DRAFT_IDS[1]))
    live, logits = live_tree(root), logits_of(3)
    assert live == [root, first, second]
    opinions = drafter(width)._judge(live, logits, sampling)
    for row, node in enumerate(live):
        asked = width + 2  # two children are no candidates any more
        ids, _ = candidates(logits[row], DRAFT_IDS, sampling, node.position + 1, asked)
        assert tokens_of(opinions[node])[:asked] == ids.tolist()
    assert {first.token, second.token} <= set(tokens_of(opinions[root]))


def test_greedy_chances_are_the_modules_and_sharper_with_a_smaller_spread() -> None:
    root = child_of(None, 1)
    logits = logits_of(1)
    chance = logits.softmax(1).max().item()
    plain = drafter(1)._judge([root], logits, SAMPLINGS[0])[root][0][1]
    sharp = drafter(1, spread=0.25)._judge([root], logits, SAMPLINGS[0])[root][0][1]
    assert math.exp(plain) == pytest.approx(chance, rel=1e-5)
    assert plain < sharp < 0


def test_noise_of_a_position_is_drawn_once_and_goes_with_it() -> None:
    found = drafter(2)
    root = child_of(None, 1)
    child = child_of(root, 2)
    noise = found._noise_of([root, child, child], SAMPLINGS[1])
    assert torch.equal(noise, gumbel(7, torch.tensor([6, 7, 7]), found._module.draft_ids))
    before = found._noise[0][7]
    found._noise_of([child], SAMPLINGS[1])
    assert found._noise[0].keys() == {7}
    assert found._noise[0][7] is before
    found.forget(0)
    assert not found._noise


def test_a_branch_is_the_path_from_the_root() -> None:
    root = child_of(None, 1)
    left, right = child_of(root, 2), child_of(root, 3)
    deep, dead = child_of(left, 4), child_of(right, 5)
    dead.alive = False
    live = live_tree(root)
    assert live == [root, left, right, deep]
    assert _branches(live) == [(), (root,), (root,), (root, left)]


@pytest.mark.parametrize(("width", "spread"), [(0, 1.0), (1, 0.0), (1, -1.0)])
def test_what_is_no_tree_is_refused(width: int, spread: float) -> None:
    with pytest.raises(ConfigError, match=f"width is {width} and spread {spread}"):
        drafter(width, spread=spread)
