"""What heuristics see of storages, in arrays, and what a heuristic is."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Storages:
    """Size, cost, last access and neighbours of every storage, and the pool: what may be evicted now.

    A storage's cost is that of all its views' operators; it depends on what those read (Appendix C.2).
    """

    def __init__(self) -> None:
        self.count = 0
        self.size: Ints = np.zeros(64, dtype=np.int64)
        self.cost: Floats = np.zeros(64)
        self.last_access: Floats = np.zeros(64)
        self.resident = np.zeros(64, dtype=np.bool_)
        self.stamp: Ints = np.zeros(64, dtype=np.int64)
        self.dependencies: list[set[int]] = []
        self.dependents: list[set[int]] = []
        self._pool: Ints = np.zeros(64, dtype=np.int64)
        self._place: list[int] = []
        self._in_pool = 0
        self._stamps = 0

    def add(self, size: int) -> int:
        """A new storage, not there yet."""
        number = self.count
        self.count += 1
        if self.count > len(self.size):
            for name in ("size", "cost", "last_access", "resident", "stamp", "_pool"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self.size[number] = size
        self.dependencies.append(set())
        self.dependents.append(set())
        self._place.append(-1)
        return number

    def grow(self, storage: int, cost: float, reads: set[int]) -> None:
        """The storage has one more view, made by an operator of this cost that reads these storages."""
        self.cost[storage] += cost
        self.dependencies[storage] |= reads
        for other in reads:
            self.dependents[other].add(storage)

    @property
    def pool(self) -> Ints:
        """The storages that may be evicted, in no order; :attr:`stamp` says when each joined."""
        return self._pool[: self._in_pool]

    def join_pool(self, storage: int) -> None:
        """Add to the pool, as its newest."""
        if self._place[storage] < 0:
            self._place[storage] = self._in_pool
            self._pool[self._in_pool] = storage
            self._in_pool += 1
            self.stamp[storage] = self._stamps
            self._stamps += 1

    def leave_pool(self, storage: int) -> None:
        """Take out of the pool, if it is in."""
        place = self._place[storage]
        if place >= 0:
            self._in_pool -= 1
            moved = int(self._pool[self._in_pool])
            self._pool[place] = moved
            self._place[moved] = place
            self._place[storage] = -1


class Heuristic(Protocol):
    """Chooses what to evict. It is told what comes and goes, and keeps what it needs to know."""

    accesses: int
    """Storages looked at, as the paper's Figure 11 counts them."""

    def watch(self, storages: Storages) -> None:
        """Begin a run over these storages."""

    def victim(self, clock: float) -> int | None:
        """The storage to evict now, or None if there is none."""

    def evicted(self, storage: int) -> None:
        """The storage is gone."""

    def returned(self, storage: int) -> None:
        """The storage is back."""

    def banished(self, storage: int) -> None:
        """The storage is gone for good, and out of the graph."""
