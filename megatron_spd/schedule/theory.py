"""What a schedule can give at best, from its counts alone."""

from __future__ import annotations


def eal_of(acceptance: float, num_stages: int) -> float:
    """EAL of one chain at an acceptance: n / (n (1 - a) + a).

    An accepted token costs 1 cycle, a corrected one n.
    """
    return num_stages / (num_stages * (1 - acceptance) + acceptance)
