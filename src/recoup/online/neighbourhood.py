"""The exact evicted neighbourhood e* (Appendix C.2).

Before a choice, one walk from all that came or went, through what is gone, finds whose neighbourhood may have changed.
That is enough: on a path through what is gone, then or now, all storages before the first one that changed are still
gone, so that the walk gets from that one back to the path's beginning. What is yet to be made for the first time counts
as gone, as in the published simulator.
"""

from __future__ import annotations

from collections.abc import Iterable

from recoup.online.around import Around
from recoup.online.metadata import Storages


class Exact(Around):
    """With all evicted storages that are needed to make it again, or that need it."""

    up = True
    down = True

    def watch(self, storages: Storages) -> None:
        """Begin a run."""
        super().watch(storages)
        self._changed: set[int] = set()
        self._declared: list[int] = []
        self._seen_yet: dict[int, bool] = {}
        """What was yet to be made at the last choice, and whether anything in the pool has seen it so."""

    def declared(self, storage: int) -> None:
        """What is yet to be made is around what it will be made of."""
        if not self.storages.resident[storage]:
            self._declared.append(storage)

    def _refresh(self) -> None:
        """Look at what is yet to be made, or was at the last choice.

        All that it reads is locked until it is made, so that nothing in the pool sees it: but for a storage of which it
        reads a view that is yet to come back.
        """
        resident, pool, reads = self.storages.resident, self.storages.pool.keys(), self.storages.dependencies
        self._changed.update(one for one in self._declared if not resident[one])
        self._changed.update(one for one, seen in self._seen_yet.items() if seen and resident[one])
        yet = [one for one in (*self._seen_yet, *self._declared) if not resident[one]]
        self._seen_yet = {one: self._seen_yet.get(one, False) or not pool.isdisjoint(reads[one]) for one in yet}
        self._declared.clear()
        if self._changed:
            self._stale |= self._seen(self._changed)
            self._changed = set()
        super()._refresh()

    def evicted(self, storage: int) -> None:
        """What is around its neighbours grew."""
        self._changed.add(storage)

    def returned(self, storage: int) -> None:
        """What is around its neighbours shrank."""
        self._changed.add(storage)

    def rewired(self, storage: int) -> None:
        """What is around it, and around its neighbours, changed."""
        self._changed.add(storage)
        self._stale.add(storage)

    def banished(self, storage: int) -> None:
        """What is around its neighbours changed if it was resident; it counts as gone."""
        self._changed.add(storage)

    def _seen(self, changed: set[int]) -> set[int]:
        """These, and all from which these are seen through what is gone."""
        found = set(changed)
        for looks, back in ((self.up, self.storages.dependents), (self.down, self.storages.dependencies)):
            if looks:
                found.update(*(back[near] for near in changed | self._gone(changed, back)))
        return found

    def around(self, storage: int) -> float:
        """The cost of all that is gone above and below it, each once."""
        found = self._gone((storage,), self.storages.dependencies) if self.up else set()
        if self.down:
            found |= self._gone((storage,), self.storages.dependents)
        return sum(map(self.storages.cost.__getitem__, found))

    def _gone(self, start: Iterable[int], edges: list[set[int]]) -> set[int]:
        """What is gone and reached from ``start`` through what is gone."""
        resident = self.storages.resident
        found: set[int] = set()
        stack = list(start)
        while stack:
            for other in edges[stack.pop()]:
                if not resident[other] and other not in found:
                    found.add(other)
                    stack.append(other)
        self.accesses += len(found)
        return found


class Ancestors(Exact):
    """With the evicted storages that are needed to make it again: MSPS, from Capuchin."""

    down = False
