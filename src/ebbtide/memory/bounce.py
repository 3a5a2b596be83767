"""Rows of pinned memory that copies between a device and a disk pass through.

What was written to disk stays in its row until the room is wanted, the oldest going first: backward
wants the newest first, and gets it from there without a read.
"""

import threading
from dataclasses import dataclass
from typing import final

from ebbtide.memory.arena import Arena, Region

WISHED_BYTES = 2**30
"""What is taken even where less is in flight: it takes what forward makes faster than the disk
does, and serves what backward wants first. Four block inputs of Llama-3-8B's shape at 32k tokens.
By arithmetic, not measured: with two of them, forward would wait for a disk of 2.4 GB/s."""


def bounce_bytes(*, disk_bytes: int, in_flight_bytes: int, room_bytes: int | None) -> int:
    """Return how much bounce memory to take.

    Args:
        disk_bytes: What a step writes to disk.
        in_flight_bytes: What may be on its way at once, both ways together.
        room_bytes: What a cap on host memory leaves; None: there is no cap. What is in flight has
            room beside the cap.
    """
    wished_bytes = min(WISHED_BYTES, disk_bytes)
    if room_bytes is not None:
        wished_bytes = min(wished_bytes, room_bytes)
    return max(min(in_flight_bytes, 2 * disk_bytes), wished_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BounceStatistics:
    """What bounce memory did since it was made."""

    num_served: int
    """Copies back that needed no read, since their row was still there."""
    served_bytes: int
    """Their bytes."""
    num_dropped: int
    """Rows that were given up for others before anybody asked for them."""


@final
class Row:
    """A piece of bounce memory that holds, or is about to hold, the bytes of one place on disk.

    `place` is the very object that the disk store gave: while a row refers to it, no other has
    its identity, so that bytes are never taken for those of a later owner of the same room.
    """

    __slots__ = ("is_filled", "num_users", "place", "region")

    def __init__(self, region: Region, place: Region) -> None:
        self.region = region
        """Where it is in the bounce memory."""
        self.place = place
        self.is_filled = False
        """Its bytes are there, or a copy that whoever copies them back waits for brings them."""
        self.num_users = 1


@final
class Bounce:
    """Divides bounce memory into rows. Owns no memory; every method may be called from any thread.

    Args:
        capacity_bytes: Size of the memory; no less than the largest copy.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._arena = Arena(capacity_bytes)
        self._changed = threading.Condition()
        self._filled: dict[int, Row] = {}
        """By the identity of their places; the oldest first."""
        self._num_served = self._served_bytes = self._num_dropped = 0

    def take(self, place: Region, *, is_waiting: bool = True) -> Row | None:
        """Return a row for the bytes of `place`; the caller is its user.

        Args:
            place: What the disk store gave.
            is_waiting: Wait for room; else None where there is none now.
        """
        with self._changed:
            while True:
                region = self._arena.take(place.num_bytes)
                if region is not None:
                    return Row(region, place)
                if not self._drop_oldest():
                    if not is_waiting:
                        return None
                    self._changed.wait()

    def fill(self, row: Row) -> None:
        """Let `find` return the row: its bytes are on their way, and whoever asks waits for them.

        A row that held other bytes of the same place is found no more.
        """
        with self._changed:
            older = self._filled.get(id(row.place))
            if older is not None:
                self._forget(older)
                if older.num_users == 0:
                    self._arena.give_back(older.region)
                    self._changed.notify_all()
            row.is_filled = True
            self._filled[id(row.place)] = row

    def find(self, place: Region) -> Row | None:
        """Return the row that holds the bytes of `place`, or None; the caller is a user of it."""
        with self._changed:
            row = self._filled.get(id(place))
            if row is None:
                return None
            row.num_users += 1
            self._num_served += 1
            self._served_bytes += place.num_bytes
            return row

    def leave(self, row: Row, *, is_wanted: bool) -> None:
        """Note that a user has done with a row.

        Args:
            is_wanted: It may serve others. One that is not is found no more, and its room is free
                when its last user has left.
        """
        with self._changed:
            row.num_users -= 1
            if not is_wanted and row.is_filled:
                self._forget(row)
            if row.num_users == 0 and not row.is_filled:
                self._arena.give_back(row.region)
            self._changed.notify_all()

    def statistics(self) -> BounceStatistics:
        """Return what was done since it was made."""
        with self._changed:
            return BounceStatistics(
                num_served=self._num_served,
                served_bytes=self._served_bytes,
                num_dropped=self._num_dropped,
            )

    def _drop_oldest(self) -> bool:
        """Free the room of the oldest row that nobody uses; False where there is none."""
        row = next((row for row in self._filled.values() if row.num_users == 0), None)
        if row is None:
            return False
        self._forget(row)
        self._arena.give_back(row.region)
        self._num_dropped += 1
        return True

    def _forget(self, row: Row) -> None:
        row.is_filled = False
        del self._filled[id(row.place)]
