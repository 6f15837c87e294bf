"""The heuristics of the DTR paper (Appendix C.3, D.1), by name.

All score cost over size and staleness. What they differ in is the cost: of the storage alone (``Local``), with its
evicted neighbourhood (``Exact``), with the relaxed one (``Classes``), with its evicted ancestors, or none; and in which
of the three measures they look at. Those can be turned off one by one, as in the paper's ablations.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from recoup.errors import MethodError
from recoup.online.components import Classes
from recoup.online.metadata import Floats, Heuristic, Ints, taken
from recoup.online.neighbourhood import Ancestors, Exact
from recoup.online.score import Score

MEASURES = ("cost", "size", "staleness")


class Local(Score):
    """The storage's own operators."""

    def costs(self, pool: Ints) -> Floats:
        """Its own cost."""
        return taken(self.storages.costs, pool)


class Random(Score):
    """Any storage, from a seed."""

    def __init__(self, size: bool = False, staleness: bool = False, seed: int = 0) -> None:
        super().__init__(size, staleness)
        self._random = random.Random(seed)

    def costs(self, pool: Ints) -> Floats:
        """A new number each time."""
        return np.array([self._random.random() for _ in range(len(pool))])


class Entry(NamedTuple):
    """A heuristic: what a storage costs to it, and the measures it looks at."""

    kind: type[Score]
    measures: tuple[str, ...] = MEASURES


HEURISTICS = {
    "dtr": Entry(Exact),
    "dtr-eq": Entry(Classes),
    "dtr-local": Entry(Local),
    "e-star": Entry(Exact, ("cost", "size")),
    "lru": Entry(Score, ("staleness",)),
    "largest": Entry(Score, ("size",)),
    "random": Entry(Random, ()),
    "msps": Entry(Ancestors, ("cost", "size")),
}


def make(name: str, without: Collection[str] = (), *, small: float = 0.0, sample: bool = False) -> Heuristic:
    """A heuristic by name, fresh for one run, with some of its measures turned off.

    It ignores storages below ``small`` times the average size, and looks at a ``sample`` of the rest, if told to.
    """
    if name not in HEURISTICS:
        raise MethodError(f"there is no heuristic {name!r}; there are {', '.join(HEURISTICS)}")
    kind, measures = HEURISTICS[name]
    for measure in without:
        if measure not in MEASURES:
            raise MethodError(f"there is no measure {measure!r}; there are {', '.join(MEASURES)}")
        if measure not in measures:
            raise MethodError(f"{name} does not look at {measure}: there is nothing to turn off")
        if len(measures) == 1:
            raise MethodError(f"{name} looks at {measure} alone, which cannot be turned off")
    if not 0 <= small <= 1:
        raise MethodError(f"small={small!r}: it is a share of the average size, from 0 to 1")
    left = set(measures) - set(without)
    if "cost" in without:
        kind = Score
    made = kind(size="size" in left, staleness="staleness" in left)
    made.small, made.sample = small, sample
    return made
