"""Checkpoint last: carry only the newest result from stage to stage and compute the rest again, every time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from recoup.graph import Graph
from recoup.planners.policy import cheapest_schedule
from recoup.schedule import Schedule


def candidates(graph: Graph) -> Iterator[Schedule]:
    """One schedule: S[t, t - 1] = 1 and nothing else, besides what may not run again."""
    S = np.zeros((len(graph.ops), len(graph.ops)), dtype=np.bool_)
    stages = np.flatnonzero(graph.arrays.mandatory).tolist()
    for newest, t in pairwise(stages):
        S[newest + 1 : t + 1, newest] = True
    yield cheapest_schedule(graph, S)
