"""What no schedule goes below: the memory of one op with what it reads, writes and what must be there by then."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from recoup.graph import Graph


@dataclass(frozen=True)
class Floor:
    """A lower bound on every schedule's peak, and the op that needs it."""

    bytes: int
    op: str


def memory_floor(graph: Graph, ordered: bool = True) -> Floor:
    """The largest, over ops that must run, of the least memory any of its implementations needs.

    Required outputs made by ops earlier in the listed order count too: they stay from their first run on. That holds
    for every schedule with the graph's first-run order; without ``ordered`` they are left out, and it holds for any.
    """
    a = graph.arrays
    worst = Floor(graph.resident_bytes, "")
    held: set[int] = set()
    for i in np.flatnonzero(a.mandatory).tolist():
        kernels = range(int(a.first_kernel[i]), int(a.first_kernel[i + 1]))
        needs = []
        for k in kernels:
            values = {*a.inputs[k].tolist(), *a.outputs[k].tolist(), *held} - {int(a.overwriting[k])}
            needs.append(int(a.bytes[list(values)].sum()) + int(a.workspace[k]))
        if graph.resident_bytes + min(needs) > worst.bytes:
            worst = Floor(graph.resident_bytes + min(needs), graph.ops[i].id)
        if ordered:
            held |= set.intersection(*({d for d in a.outputs[k].tolist() if a.required[d]} for k in kernels))
    return worst


def cost_floor(graph: Graph) -> float:
    """The cost of running every op that must run once, in its fastest implementation: a bound on every schedule."""
    times = [min(impl.time for impl in op.implementations) for op in graph.ops if not op.optional]
    return sum(times) if graph.arrays.integral else math.fsum(times)
