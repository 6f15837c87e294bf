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

    def costs(self, pool: Ints) -> Floats:
        """Its own cost and that of what is evicted around it."""
        self._refresh()
        return taken(self.storages.costs, pool) + self._around[pool]

    def _refresh(self) -> None:
        """Sum again for what is stale and in the pool; what is there but locked stays stale.

        What is gone will be stale when it returns.
        """
        while len(self._around) < self.storages.count:
            self._around = np.concatenate([self._around, np.zeros_like(self._around)])
        again = self.storages.pool.keys() & self._stale
        resident = self.storages.resident
        self._stale = {storage for storage in self._stale - again if resident[storage]}
        for storage in again:
            self._around[storage] = self.around(storage)

    def around(self, storage: int) -> float:
        """The cost of what is evicted around a storage."""
        raise NotImplementedError
