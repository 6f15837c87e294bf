"""Cost over size and staleness: the score that all heuristics of the DTR paper share (Appendix C.3, D.1)."""

from __future__ import annotations

import math
import random
from itertools import islice

import numpy as np

from recoup.online.metadata import Floats, Ints, Storages, taken


class Score:
    """``cost / (size * staleness)``, each factor on or off; subclasses say what a storage costs.

    The lowest score is evicted. A zero denominator scores infinity. The paper's prototype looks at fewer storages to
    choose faster (section 5): none that is ``small`` beside the average one, and with ``sample`` only every so many,
    about the square root of all.
    """

    def __init__(self, size: bool = True, staleness: bool = True) -> None:
        self.by_size = size
        self.by_staleness = staleness
        self.accesses = 0
        self.small = 0.0
        self.sample = False
        self._chance = random.Random(0)

    def watch(self, storages: Storages) -> None:
        """Begin a run."""
        self.storages = storages

    def victim(self, clock: float) -> int | None:
        """The oldest in the pool that scores 0, or else the newest of those that score lowest."""
        if not self.storages.pool:
            return None
        pool = self._candidates()
        count = len(pool)
        self.accesses += count
        scores = self.scores(pool, clock)
        lowest = scores.min()
        if lowest <= 0:
            zero = np.flatnonzero(scores == 0)
            if len(zero):
                return int(pool[zero[0]])
        return int(pool[count - 1 - scores[::-1].argmin()])

    def _candidates(self) -> Ints:
        """Storages in the pool that are looked at, in the order in which they joined."""
        pool = self.storages.pool
        count = len(pool)
        if self.sample:
            every = math.isqrt(count)
            pool = dict.fromkeys(islice(pool, self._chance.randrange(every), None, every))
        found = np.fromiter(pool, np.int64, len(pool))
        if self.small:
            sizes = taken(self.storages.sizes, found)
            found = found[sizes >= self.small * sizes.mean()]
        return found

    def scores(self, pool: Ints, clock: float) -> Floats:
        """The score of each storage in the pool."""
        below = taken(self.storages.sizes, pool) if self.by_size else np.ones(len(pool))
        if self.by_staleness:
            below *= clock - taken(self.storages.last_access, pool)
        with np.errstate(divide="ignore", invalid="ignore"):
            scores: Floats = self.costs(pool) / below
        scores[below == 0] = np.inf
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

    def rewired(self, storage: int) -> None:
        """Nothing to keep."""

    def banished(self, storage: int) -> None:
        """Nothing to keep."""
