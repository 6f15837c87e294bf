"""The heuristics of the DTR paper (Appendix C.3, D.1), each a measure of cost over size and staleness.

A heuristic's score is ``cost / (size * staleness)``, each factor on or off; the lowest score is evicted, a zero
denominator scores infinity. What they differ in is the cost: of the storage alone (``Local``), with its evicted
neighbourhood (``Exact``), with the relaxed one kept by union-find (``Classes``), with its evicted ancestors, or none.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from recoup.errors import MethodError
from recoup.online.metadata import Floats, Heuristic, Ints, Storages


class Score:
    """Cost over size and staleness; subclasses say what a storage costs."""

    def __init__(self, size: bool = True, staleness: bool = True) -> None:
        self.by_size = size
        self.by_staleness = staleness
        self.accesses = 0

    def watch(self, storages: Storages) -> None:
        """Begin a run."""
        self.storages = storages

    def victim(self, clock: float) -> int | None:
        """The storage with the lowest score; see the simulator for ties."""
        pool = self.storages.pool
        if len(pool) == 0:
            return None
        self.accesses += len(pool)
        below = np.ones(len(pool))
        if self.by_size:
            below *= self.storages.size[pool]
        if self.by_staleness:
            below *= clock - self.storages.last_access[pool]
        costs = self.costs(pool)
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = np.where(below == 0, np.inf, costs / below)
        stamps = self.storages.stamp[pool]
        zero = np.flatnonzero(scores == 0)
        if len(zero):
            return int(pool[zero[np.argmin(stamps[zero])]])
        lowest = np.flatnonzero(scores == scores.min())
        return int(pool[lowest[np.argmax(stamps[lowest])]])

    def costs(self, pool: Ints) -> Floats:
        """What each storage in the pool costs to lose."""
        return np.ones(len(pool))

    def evicted(self, storage: int) -> None:
        """Nothing to keep."""

    def returned(self, storage: int) -> None:
        """Nothing to keep."""

    def banished(self, storage: int) -> None:
        """Nothing to keep."""


class Local(Score):
    """The storage's own operators."""

    def costs(self, pool: Ints) -> Floats:
        """Its own cost."""
        return self.storages.cost[pool]


class Exact(Score):
    """With all evicted storages that are needed to make it again, or that need it (e*, Appendix C.2)."""

    up = True
    down = True

    def watch(self, storages: Storages) -> None:
        """Begin a run."""
        super().watch(storages)
        self._sums: dict[int, float] = {}

    def costs(self, pool: Ints) -> Floats:
        """Its own cost and that of its evicted neighbourhood."""
        sums = self._sums
        around = [sums[s] if s in sums else self._rebuild(s) for s in pool.tolist()]
        return self.storages.cost[pool] + np.array(around, dtype=np.float64)

    def _rebuild(self, storage: int) -> float:
        found = self._closure(storage, self.storages.dependencies) if self.up else set()
        if self.down:
            found |= self._closure(storage, self.storages.dependents)
        total = float(sum(self.storages.cost[other] for other in found))
        self._sums[storage] = total
        return total

    def _closure(self, storage: int, edges: list[set[int]]) -> set[int]:
        resident, found = self.storages.resident, set()
        stack = [storage]
        while stack:
            for other in edges[stack.pop()]:
                if not resident[other] and other not in found:
                    found.add(other)
                    stack.append(other)
        self.accesses += len(found)
        return found

    def _changed(self, storage: int) -> None:
        """Forget the sums of all resident storages from which ``storage`` is reached through evicted ones."""
        for edges in (self.storages.dependencies, self.storages.dependents):
            near = self._closure(storage, edges) | {storage}
            for other in near:
                for seen in edges[other]:
                    self._sums.pop(seen, None)
        self._sums.pop(storage, None)

    def evicted(self, storage: int) -> None:
        """Its neighbours' neighbourhoods grew."""
        self._changed(storage)

    def returned(self, storage: int) -> None:
        """Its neighbours' neighbourhoods shrank."""
        self._changed(storage)

    def banished(self, storage: int) -> None:
        """It is no neighbour any more."""
        self._changed(storage)


class Ancestors(Exact):
    """With the evicted storages that are needed to make it again: MSPS, from Capuchin."""

    down = False


class Classes(Score):
    """With the evicted components it touches, kept by union-find; what comes back leaves phantom connections behind."""

    def watch(self, storages: Storages) -> None:
        """Begin a run."""
        super().watch(storages)
        self._parent: dict[int, int] = {}
        self._total: dict[int, float] = {}

    def _find(self, storage: int) -> int:
        parent = self._parent
        root = storage
        while parent[root] != root:
            root = parent[root]
            self.accesses += 1
        while parent[storage] != root:
            parent[storage], storage = root, parent[storage]
        return root

    def costs(self, pool: Ints) -> Floats:
        """Its own cost and that of the components of its evicted neighbours."""
        around = []
        resident = self.storages.resident
        for storage in pool.tolist():
            roots = {
                self._find(other)
                for edges in (self.storages.dependencies, self.storages.dependents)
                for other in edges[storage]
                if not resident[other] and other in self._parent
            }
            around.append(sum(self._total[root] for root in roots))
        return self.storages.cost[pool] + np.array(around, dtype=np.float64)

    def evicted(self, storage: int) -> None:
        """It joins the components next to it."""
        if storage not in self._parent:
            self._parent[storage] = storage
            self._total[storage] = 0.0
        root = self._find(storage)
        self._total[root] += float(self.storages.cost[storage])
        for edges in (self.storages.dependencies, self.storages.dependents):
            for other in edges[storage]:
                if not self.storages.resident[other] and other in self._parent:
                    self._union(storage, other)

    def _union(self, one: int, other: int) -> None:
        a, b = self._find(one), self._find(other)
        if a != b:
            self._parent[b] = a
            self._total[a] += self._total.pop(b)

    def returned(self, storage: int) -> None:
        """Its component loses its cost, but keeps its connections."""
        if storage in self._parent:
            self._total[self._find(storage)] -= float(self.storages.cost[storage])


class Random(Score):
    """Any storage, from a seed."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(False, False)
        self._random = random.Random(seed)

    def costs(self, pool: Ints) -> Floats:
        """A new number each time."""
        return np.array([self._random.random() for _ in range(len(pool))])


HEURISTICS: dict[str, Callable[[], Heuristic]] = {
    "dtr": Exact,
    "dtr-eq": Classes,
    "dtr-local": Local,
    "e-star": lambda: Exact(staleness=False),
    "lru": lambda: Score(size=False),
    "largest": lambda: Score(staleness=False),
    "random": Random,
    "msps": lambda: Ancestors(staleness=False),
}


def make(name: str) -> Heuristic:
    """A heuristic by name, fresh for one run."""
    if name not in HEURISTICS:
        raise MethodError(f"there is no heuristic {name!r}; there are {', '.join(HEURISTICS)}")
    return HEURISTICS[name]()
