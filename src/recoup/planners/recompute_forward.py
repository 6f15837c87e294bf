"""Recompute forward: carry gradients only and run the forward pass again, as far as needed, for every backward op.

Not in the paper's Table 1, whose checkpoint-last drops gradients too, but of its kind: hardly any needs less memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recoup.graph import Graph
from recoup.planners.policy import cheapest_schedule
from recoup.schedule import Schedule
from recoup.task import NotApplicableError

LARGEST = 2000  # ops; the schedule grows with their square


def candidates(graph: Graph) -> Iterator[Schedule]:
    """Two schedules: the forward pass keeps what a later forward op reads, or not even that."""
    if len(graph.ops) > LARGEST:
        raise NotApplicableError(f"with {len(graph.ops)} ops, more than {LARGEST}, it would run millions of them")
    a = graph.arrays
    S = np.tri(len(graph.ops), k=-1, dtype=np.bool_)
    S[:, a.forward] = False
    least = S.copy()
    for t in np.flatnonzero(a.forward & a.mandatory).tolist():
        for i in a.producer[a.inputs[int(a.first_kernel[t])]].tolist():
            S[i + 1 : t + 1, i] = True
    yield cheapest_schedule(graph, S)
    yield cheapest_schedule(graph, least)
