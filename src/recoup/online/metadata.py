"""What heuristics see of storages, and what a heuristic is.

Things happen to storages one at a time, and a choice looks at all that may be evicted at once. So what is read one by
one is in lists, what a choice reads is in arrays (Python's own, which grow; :func:`taken` reads them), and size and
cost, which hardly ever change, are in both.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
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
        self.size: list[int] = []
        self.cost: list[float] = []
        self.sizes = array("d")
        self.costs = array("d")
        self.last_access = array("d")
        self.resident: list[bool] = []
        self.dependencies: list[set[int]] = []
        self.dependents: list[set[int]] = []
        self.pool: dict[int, None] = {}
        """The storages that may be evicted, in the order in which they joined."""

    def add(self, size: int, cost: float = 0, reads: Collection[int] = ()) -> int:
        """A new storage, not there yet, and what the operator costs and reads that makes it."""
        number = self.count
        self.sizes.append(size)
        self.costs.append(cost)
        self.last_access.append(0)
        self.size.append(size)
        self.cost.append(cost)
        self.resident.append(False)
        self.dependencies.append(set(reads))
        self.dependents.append(set())
        for other in reads:
            self.dependents[other].add(number)
        self.count += 1
        return number

    def cut(self, count: int) -> None:
        """Forget all but the first storages."""
        for column in (self.sizes, self.costs, self.last_access, self.size, self.cost, self.resident):
            del column[count:]
        del self.dependencies[count:], self.dependents[count:]
        self.count = count

    def grow(self, storage: int, cost: float, reads: set[int]) -> bool:
        """The storage has one more view, made by an operator of this cost that reads these storages; whether it
        has new neighbours by that."""
        if cost:
            self.cost[storage] += cost
            self.costs[storage] = self.cost[storage]
        if reads <= self.dependencies[storage]:
            return False
        self.dependencies[storage] |= reads
        for other in reads:
            self.dependents[other].add(storage)
        return True

    def raise_cost(self, storage: int, cost: float) -> bool:
        """The storage costs at least this; whether that is more than before."""
        if cost <= self.cost[storage]:
            return False
        self.cost[storage] = self.costs[storage] = cost
        return True


def taken(numbers: array[float], storages: Ints) -> Floats:
    """The numbers of some storages."""
    return np.frombuffer(numbers)[storages]


class Heuristic(Protocol):
    """Chooses what to evict. It is told what comes and goes, and keeps what it needs to know."""

    accesses: int
    """Storages looked at: one for each that is scored and each that is visited to keep costs up to date (D.3)."""
    by_staleness: bool
    """Whether it would rather evict what was not used for long."""

    def watch(self, storages: Storages) -> None:
        """Begin a run over these storages."""

    def victim(self, clock: float) -> int | None:
        """The storage to evict now, or None if there is none."""

    def declared(self, storage: int) -> None:
        """The storage is new; it is not resident if it is yet to be made."""

    def evicted(self, storage: int) -> None:
        """The storage is gone."""

    def returned(self, storage: int) -> None:
        """The storage is back."""

    def rewired(self, storage: int) -> None:
        """The storage has new neighbours."""

    def banished(self, storage: int) -> None:
        """The storage is gone for good, and out of the graph."""
