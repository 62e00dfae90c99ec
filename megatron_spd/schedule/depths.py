"""What a draft may read of a position: the policy "deepest available", in one function.

`depth_of` says which row the engine builds of a position, `in_flight` which rows a moment of
training has of its own and which it shares. The first calls the second: that is why a served row
equals a trained one.
"""

from typing import Any


def in_flight(distance: Any, fill: Any) -> Any:
    """Whether the position `distance` behind the newest is one of the `fill` tokens in flight.

    Numbers, or tensors of them; training builds its masks from it.
    """
    return distance < fill


def depth_of(distance: int, fill: int, num_stages: int) -> int:
    """Depth of the position `distance` behind the newest when `fill` tokens are in flight.

    A position still in flight has completed as many stages as it is behind; one that left the
    pipeline, at distance `fill` or more, has completed all of them.

    >>> [depth_of(k, fill=3, num_stages=3) for k in range(5)]   # the pipe is full
    [0, 1, 2, 3, 3]
    >>> [depth_of(k, fill=1, num_stages=3) for k in range(5)]   # refilling after a rejection
    [0, 3, 3, 3, 3]
    """
    if distance < 0 or not 1 <= fill <= num_stages:
        raise ValueError(f"distance {distance} or fill {fill} is outside 1..{num_stages}")
    return distance if in_flight(distance, fill) else num_stages
