"""Cost over size and staleness: the score that all heuristics of the DTR paper share (Appendix C.3, D.1)."""

from __future__ import annotations

import numpy as np

from recoup.online.metadata import Floats, Ints, Storages


class Score:
    """``cost / (size * staleness)``, each factor on or off; subclasses say what a storage costs.

    The lowest score is evicted. A zero denominator scores infinity.
    """

    def __init__(self, size: bool = True, staleness: bool = True) -> None:
        self.by_size = size
        self.by_staleness = staleness
        self.accesses = 0

    def watch(self, storages: Storages) -> None:
        """Begin a run."""
        self.storages = storages

    def victim(self, clock: float) -> int | None:
        """The oldest in the pool that scores 0, or else the newest of those that score lowest."""
        count = len(self.storages.pool)
        if not count:
            return None
        self.accesses += count
        pool = np.fromiter(self.storages.pool, np.int64, count)
        scores = self.scores(pool, clock)
        lowest = scores.min()
        if lowest <= 0:
            zero = np.flatnonzero(scores == 0)
            if len(zero):
                return int(pool[zero[0]])
        return int(pool[count - 1 - scores[::-1].argmin()])

    def scores(self, pool: Ints, clock: float) -> Floats:
        """The score of each storage in the pool."""
        below = self.storages.sizes[pool] if self.by_size else np.ones(len(pool))
        if self.by_staleness:
            below *= clock - self.storages.last_access[pool]
        scores = np.full(len(pool), np.inf)
        np.divide(self.costs(pool), below, out=scores, where=below != 0)
        return scores

    def costs(self, pool: Ints) -> Floats:
        """What each storage in the pool costs to lose."""
        return np.ones(len(pool))

    def declared(self, storage: int) -> None:
        """Nothing to keep."""

    def evicted(self, storage: int) -> None:
        """Nothing to keep."""

    def returned(self, storage: int) -> None:
        """Nothing to keep."""

    def banished(self, storage: int) -> None:
        """Nothing to keep."""
