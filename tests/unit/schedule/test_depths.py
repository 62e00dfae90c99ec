import pytest

from megatron_spd.schedule.depths import depth_of


def test_a_full_pipe_and_every_refill() -> None:
    table = [[depth_of(k, fill, 4) for k in range(6)] for fill in (1, 2, 3, 4)]
    assert table == [
        [0, 4, 4, 4, 4, 4],
        [0, 1, 4, 4, 4, 4],
        [0, 1, 2, 4, 4, 4],
        [0, 1, 2, 3, 4, 4],
    ]


@pytest.mark.parametrize(("distance", "fill"), [(-1, 1), (0, 0), (0, 5)])
def test_outside_is_refused(distance: int, fill: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        depth_of(distance, fill, 4)
