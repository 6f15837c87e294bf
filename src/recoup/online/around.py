"""The cost of a storage with what is evicted around it, remembered: between two choices it changes for very few."""

from __future__ import annotations

import numpy as np

from recoup.online.metadata import Floats, Ints, Storages, taken
from recoup.online.score import Score


class Around(Score):
    """Keeps what is around each storage, and sums it again only for those that subclasses call stale."""

    def watch(self, storages: Storages) -> None:
        """Begin a run."""
        super().watch(storages)
        self._around: Floats = np.zeros(64)
        self._stale: set[int] = set()
        self._changed: set[int] = set()

    def costs(self, pool: Ints) -> Floats:
        """Its own cost and that of what is evicted around it."""
        self._refresh()
        return taken(self.storages.costs, pool) + self._around[pool]

    def _refresh(self) -> None:
        """Sum again for what is stale and in the pool; the rest stays stale."""
        while len(self._around) < self.storages.count:
            self._around = np.concatenate([self._around, np.zeros_like(self._around)])
        if self._changed:
            self._stale |= self.seen(self._changed)
            self._changed = set()
        again = self.storages.pool.keys() & self._stale
        self._stale -= again
        for storage in again:
            self._around[storage] = self.around(storage)

    def seen(self, changed: set[int]) -> set[int]:
        """The storages that may have another sum around them, now that these came or went."""
        raise NotImplementedError

    def around(self, storage: int) -> float:
        """The cost of what is evicted around a storage."""
        raise NotImplementedError

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
