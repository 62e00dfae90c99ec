"""What a draft may read of a position: the policy "deepest available", in one function.

The engine calls it for the rows it builds, training for its mask and its loss weights; that they
call the same function is why a served row equals a trained one.
"""


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
    return distance if distance < fill else num_stages
