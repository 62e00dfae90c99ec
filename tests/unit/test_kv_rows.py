"""Who sees which row."""

import torch

from megatron_spd.kv_rows import KvRows


def pool() -> KvRows:
    return KvRows(2, 8, 1, 4, torch.float32)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_high_is_the_highest_row_ever_inserted() -> None:
    kv = pool()
    kv.insert(ids(5), ids(0))
    kv.insert(ids(1), ids(1))
    assert kv.high == 6


def test_a_node_sees_committed_rows_of_its_request_up_to_itself() -> None:
    kv = pool()
    kv.insert(ids(0, 1, 2, 3), ids(0, 1, 2, 0))
    kv.commit(ids(0, 1, 2, 3), ids(7, 7, 7, 9))
    kv.insert(ids(4), ids(1))
    seen = kv.visible(ids(4), ids(7), ids(1), ids(-1).unsqueeze(0))
    assert seen.tolist() == [[True, True, False, False, True]]


def test_uncommitted_rows_are_seen_by_descendants_only() -> None:
    kv = pool()
    kv.insert(ids(0, 1, 2), ids(0, 0, 1))
    seen = kv.visible(ids(1, 2), ids(7, 7), ids(0, 1), torch.tensor([[-1, -1], [0, -1]]))
    assert seen.tolist() == [[False, True, False], [True, False, True]]


def test_inserting_again_uncommits() -> None:
    kv = pool()
    kv.insert(ids(0), ids(0))
    kv.commit(ids(0), ids(7))
    kv.insert(ids(0), ids(4))
    kv.insert(ids(1), ids(9))
    seen = kv.visible(ids(1), ids(7), ids(9), ids(-1).unsqueeze(0))
    assert seen.tolist() == [[False, True]]
    assert int(kv.position[0]) == 4


def test_write_touches_one_layer() -> None:
    kv = pool()
    kv.write(1, ids(3), torch.ones(1, 1, 4), torch.full((1, 1, 4), 2.0))
    assert kv.keys[1, 3].sum() == 4 and kv.values[1, 3].sum() == 8
    assert kv.keys[0].sum() == 0
