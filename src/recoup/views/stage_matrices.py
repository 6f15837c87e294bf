"""Checkmate's matrices R and S as views of a schedule, and the way back (Algorithm 2, second phase).

Columns are ops. Row ``t`` of R says which ops run in stage ``t``, in op order; row ``t`` of S says of which ops an
output is carried from stage ``t - 1`` into stage ``t``. A stage ends with a first run, as in equation (8a); a new row
also begins whenever an op repeats within a stage or runs out of order, so there are at least as many rows as ops, and
exactly as many for the schedules of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recoup.arrays import Bools, Ints
from recoup.graph import Graph
from recoup.judge import simulate
from recoup.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Matrices:
    """R and S, rows are stages and columns ops."""

    R: Bools
    S: Bools


def matrices(schedule: Schedule) -> Matrices:
    """R and S of a valid schedule; each op counts as one node, carried if any of its outputs is."""
    graph, ops = schedule.graph, schedule.ops
    row = stages(schedule)
    rows = int(row[-1]) + 1 if len(row) else 0
    R = np.zeros((rows, len(graph.ops)), dtype=np.bool_)
    R[row, ops] = True
    S = np.zeros_like(R)
    alive = simulate(graph, schedule).instances
    producer = graph.arrays.producer[alive.value]
    for op, made, used in zip(producer.tolist(), row[alive.first], row[alive.last], strict=True):
        S[made + 1 : used + 1, op] = True
    return Matrices(R, S)


def stages(schedule: Schedule) -> Ints:
    """The stage of each step."""
    ops = schedule.ops
    if not len(ops):
        return np.zeros(0, dtype=np.int64)
    first_run = np.zeros(len(ops), dtype=np.bool_)
    first_run[np.unique(ops, return_index=True)[1]] = True
    begins = np.zeros(len(ops), dtype=np.int64)
    begins[1:] = first_run[:-1] | (ops[1:] <= ops[:-1])
    return np.cumsum(begins)


def minimal_recomputation(graph: Graph, S: Bools) -> Bools:
    """The R with fewest ones for a given S: Algorithm 2's second phase.

    Start from the diagonal (8a), compute what S wants carried but nobody made (1c), then, in each stage from right
    to left, compute what a computed op needs and S does not have (1b).
    """
    R = np.diag(graph.arrays.mandatory)
    carried = np.asarray(S, dtype=np.bool_)
    R[:-1] |= carried[1:] & ~carried[:-1]
    needs = dependencies(graph)
    for t in range(len(R)):
        row, have = R[t], carried[t]
        waiting = np.flatnonzero(row).tolist()
        while waiting:
            for i in needs[waiting.pop()]:
                if not row[i] and not have[i]:
                    row[i] = True
                    waiting.append(i)
    return R


def schedule_of(graph: Graph, R: Bools) -> Schedule:
    """Run the ops of R row by row, each row in op order, as Algorithm 1 does."""
    return Schedule.of_ops(graph, np.nonzero(R)[1])


def dependencies(graph: Graph) -> list[list[int]]:
    """For each op, the ops whose outputs its first implementation reads: DEPS of section 4.4."""
    a = graph.arrays
    return [np.unique(a.producer[a.inputs[int(k)]]).tolist() for k in a.first_kernel[:-1]]
