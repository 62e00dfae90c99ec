"""Which KV rows are free. The lowest free row goes first, so that the rows in use stay compact."""

from __future__ import annotations

import heapq

from megatron_spd.errors import ScheduleError


class RowPool:
    """Row numbers 0..num_rows-1, each free, in flight or committed.

    A node takes a row when it enters stage 0. Commit and death never move or copy anything: a
    commit sets a bit, and a row is free again once no wave that writes it still travels.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows))
        self.in_flight: set[int] = set()
        self.committed: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """The lowest free row, now in flight.

        Raises:
            ScheduleError: no row is free.
        """
        if not self._free:
            raise ScheduleError(f"all {self.num_rows} KV rows are taken; admit by free rows")
        row = heapq.heappop(self._free)
        self.in_flight.add(row)
        return row

    def commit(self, row: int) -> None:
        """A row in flight belongs to the text from now on."""
        self.in_flight.remove(row)
        self.committed.add(row)

    def release(self, row: int) -> None:
        """A row in flight or committed is free again."""
        if row in self.committed:
            self.committed.remove(row)
        else:
            self.in_flight.remove(row)
        heapq.heappush(self._free, row)

    def check_integrity(self) -> None:
        """Raise ScheduleError unless free + committed + in flight == rows, each row once."""
        total = len(self._free) + len(self.committed) + len(self.in_flight)
        rows = {*self._free, *self.committed, *self.in_flight}
        if total != self.num_rows or len(rows) != self.num_rows:
            raise ScheduleError(
                f"{len(self._free)} free + {len(self.committed)} committed + "
                f"{len(self.in_flight)} in flight rows, expected {self.num_rows} in all"
            )
