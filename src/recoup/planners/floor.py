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


def memory_floor(graph: Graph) -> Floor:
    """The largest, over ops that must run, of the least memory any of its implementations needs.

    Required outputs made by ops earlier in the listed order count too: they stay from their first run on. That holds
    for every schedule with the graph's first-run order.
    """
    a = graph.arrays
    worst = Floor(graph.resident_bytes, "")
    held: set[int] = set()
    for i in np.flatnonzero(a.mandatory).tolist():
        needs = []
        for k in range(int(a.first_kernel[i]), int(a.first_kernel[i + 1])):
            values = {*a.inputs[k].tolist(), *a.outputs[k].tolist(), *held} - {int(a.overwriting[k])}
            needs.append(int(a.bytes[list(values)].sum()) + int(a.workspace[k]))
        if graph.resident_bytes + min(needs) > worst.bytes:
            worst = Floor(graph.resident_bytes + min(needs), graph.ops[i].id)
        kernels = range(int(a.first_kernel[i]), int(a.first_kernel[i + 1]))
        made = set.intersection(*({d for d in a.outputs[k].tolist() if a.required[d]} for k in kernels))
        held |= made
    return worst


def cost_floor(graph: Graph) -> float:
    """The cost of running every op that must run once, in its fastest implementation: a bound on every schedule."""
    times = [min(impl.time for impl in op.implementations) for op in graph.ops if not op.optional]
    return sum(times) if graph.arrays.integral else math.fsum(times)
