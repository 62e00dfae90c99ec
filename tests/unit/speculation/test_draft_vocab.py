import pytest
import torch

from megatron_spd.errors import ConfigError
from megatron_spd.speculation.draft_vocab import choose_draft_ids


def test_must_have_then_most_frequent_ties_to_the_lowest() -> None:
    chosen = choose_draft_ids([0, 5, 5, 9, 0, 5], 4, [0, 4], 6)
    assert chosen.tolist() == [0, 1, 3, 4]
    assert chosen.dtype == torch.int64
    assert choose_draft_ids(torch.zeros(4), 3, [], 4).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("size", "must", "match"),
    [(1, [0, 1], "exceed"), (7, [], "fit"), (0, [], "fit"), (3, [6], "leave"), (3, [-1], "leave")],
)
def test_what_does_not_fit_is_refused(size: int, must: list[int], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        choose_draft_ids([1] * 6, size, must, 6)
