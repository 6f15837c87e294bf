"""Other orders of first runs: the listed order is the program's, and not always the thriftiest.

Greedy list scheduling: of the ops that can run, run the one that leaves least memory in use, the listed order breaking
ties. It runs a weight's gradient as soon as it can, and finishes a branch before it begins the next. Ops marked
``once`` keep their order among each other, for what they do may be seen from outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from recoup.graph import Graph
from recoup.judge import simulate
from recoup.schedule import Schedule


def other_orders(graph: Graph) -> Iterator[Graph]:
    """The graph in other orders, where the plain step then needs less memory than in the listed one."""
    order = thrifty_order(graph)
    if order == list(range(len(graph.ops))):
        return
    other = replace(graph, ops=tuple(graph.ops[i] for i in order))
    plain = [simulate(g, Schedule.default(g)).peak_bytes for g in (other, graph)]
    if plain[0] < plain[1]:
        yield other


def thrifty_order(graph: Graph) -> list[int]:
    """Op numbers in an order in which the ops can run, chosen greedily by the memory each leaves in use."""
    a = graph.arrays
    n = len(graph.ops)
    kernels = [range(int(b), int(e)) for b, e in zip(a.first_kernel[:-1], a.first_kernel[1:], strict=True)]
    reads = [sorted({d for k in ks for d in a.inputs[k].tolist()}) for ks in kernels]
    writes = [sorted({d for k in ks for d in a.outputs[k].tolist()}) for ks in kernels]
    waiting = [set(a.producer[values].tolist()) for values in reads]
    once = np.flatnonzero(a.once).tolist()
    for before, after in pairwise(once):
        waiting[after].add(before)
    after_me: list[list[int]] = [[] for _ in range(n)]
    for i, sources in enumerate(waiting):
        for source in sources:
            after_me[source].append(i)
    users = np.zeros(len(graph.values), dtype=np.int64)
    for values in reads:
        users[values] += 1
    users[a.required] += 1  # never freed
    ready = {i for i in range(n) if not waiting[i]}
    order: list[int] = []
    while ready:
        best = min(ready, key=lambda i: (_growth(a.bytes, users, reads[i], writes[i]), i))
        ready.remove(best)
        order.append(best)
        users[reads[best]] -= 1
        for i in after_me[best]:
            waiting[i].discard(best)
            if not waiting[i]:
                ready.add(i)
    return order


def _growth(size: np.ndarray, users: np.ndarray, reads: list[int], writes: list[int]) -> int:
    """Bytes in use after the op, less those before it."""
    made = sum(int(size[d]) for d in writes if users[d])
    return made - sum(int(size[d]) for d in reads if users[d] == 1)
