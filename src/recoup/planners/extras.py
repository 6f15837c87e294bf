"""A schedule as the first runs in order and a set of extra runs, which is what realisation, repair and search work on.

An extra run (t, i) is op i run again just before the first run of op t. Any set of extra runs is a valid schedule: what
an extra run reads lives on until then. A run is numbered t * n + i, with i = t for first runs, so sorting the numbers
gives the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recoup.arrays import Ints
from recoup.graph import Graph
from recoup.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Runs:
    """Run numbers in order, with the kernel of each."""

    graph: Graph
    number: Ints
    kernel: Ints

    @staticmethod
    def of(schedule: Schedule) -> Runs:
        """The runs of a schedule, each stage in op order and each op once in it."""
        ops = schedule.ops
        n = len(schedule.graph.ops)
        first = np.zeros(len(ops), dtype=np.bool_)
        first[np.unique(ops, return_index=True)[1]] = True
        # the stage of a step is the op of the next first run; what follows the last first run is never needed
        steps = np.flatnonzero(first)
        after = np.searchsorted(steps, np.arange(len(ops)))
        kept = after < len(steps)
        stage = ops[steps[after[kept]]]
        number, where = np.unique(stage * n + ops[kept], return_index=True)
        return Runs(schedule.graph, number, schedule.kernels[kept][where])

    def schedule(self) -> Schedule:
        """The schedule."""
        return Schedule(self.graph, self.kernel.copy())

    def extra(self) -> Ints:
        """Positions of the extra runs."""
        n = len(self.graph.ops)
        return np.flatnonzero(self.number // n != self.number % n)

    def with_runs(self, number: list[int], kernel: list[int]) -> Runs:
        """More runs; numbers that are there already stay as they are."""
        new = np.asarray(number, dtype=np.int64)
        at = np.searchsorted(self.number, new)
        fresh = (at == len(self.number)) | (self.number[np.minimum(at, len(self.number) - 1)] != new)
        order = np.argsort(new[fresh], kind="stable")
        at, new, more = at[fresh][order], new[fresh][order], np.asarray(kernel, dtype=np.int64)[fresh][order]
        return Runs(self.graph, np.insert(self.number, at, new), np.insert(self.kernel, at, more))

    def without(self, positions: Ints) -> Runs:
        """Fewer runs."""
        return Runs(self.graph, np.delete(self.number, positions), np.delete(self.kernel, positions))
