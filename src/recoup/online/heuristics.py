"""The heuristics of the DTR paper (Appendix C.3, D.1), by name.

All score cost over size and staleness. What they differ in is the cost: of the storage alone (``Local``), with its
evicted neighbourhood (``Exact``), with the relaxed one (``Classes``), with its evicted ancestors, or none.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from recoup.errors import MethodError
from recoup.online.components import Classes
from recoup.online.metadata import Floats, Heuristic, Ints
from recoup.online.neighbourhood import Ancestors, Exact
from recoup.online.score import Score


class Local(Score):
    """The storage's own operators."""

    def costs(self, pool: Ints) -> Floats:
        """Its own cost."""
        return self.storages.costs[pool]


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
