"""From a point of the cut relaxation to a schedule: in each period, recompute what is needed as late as possible."""

from __future__ import annotations

import numpy as np

from recoup.planners.cuts import CutProgram
from recoup.schedule import Schedule
from recoup.solvers.program import Floats


def realise(cuts: CutProgram, x: Floats) -> Schedule | None:
    """The schedule of an integral point; None if in-place kernels got in each other's way.

    It costs no more than the point: a period's runs are among those of R. Whether it fits is for the judge.
    """
    return _Realisation(cuts, x).run()


class _Realisation:
    def __init__(self, cuts: CutProgram, x: Floats) -> None:
        self.cuts = cuts
        self.live, self.first, self.again = cuts.live(x), cuts.chosen(x), cuts.again(x)
        self.available: set[int] = set()
        self.runs: list[int] = []
        self.period = 0

    def run(self) -> Schedule | None:
        a = self.cuts.graph.arrays
        for u in range(len(self.cuts.kernels)):
            if u not in self.first:
                continue
            k = self.first[u]
            is_cut = self.period < len(self.live) and u == self.cuts.cuts[self.period]
            needed = list(self.cuts.reads[k])
            if is_cut:
                needed += sorted(d for d in self.live[self.period] if a.producer[d] < u)
            if not all(self._bring(d) for d in needed) or not self.available.issuperset(self.cuts.reads[k]):
                return None
            if is_cut:
                self.available &= self.live[self.period] | {d for d in self.available if a.once[a.producer[d]]}
                self.period += 1
            self._run(k)
        return Schedule(self.cuts.graph, np.array(self.runs, dtype=np.int64))

    def _bring(self, d: int) -> bool:
        """Make the value available, with what that takes; False if it cannot be."""
        a = self.cuts.graph.arrays
        waiting = [d]
        while waiting:
            value = waiting[-1]
            if value in self.available:
                waiting.pop()
                continue
            if a.once[a.producer[value]] or len(waiting) > len(self.cuts.reads):
                return False
            k = self._kernel(value)
            missing = [e for e in self.cuts.reads[k] if e not in self.available]
            if missing:
                waiting += missing[::-1]
            else:
                self._run(k)
                waiting.pop()
        return True

    def _kernel(self, d: int) -> int:
        makers = self.cuts.makers[d]
        planned = [k for k in makers if (self.period, k) in self.again]
        return planned[0] if planned else makers[0]

    def _run(self, k: int) -> None:
        self.runs.append(k)
        self.available.update(self.cuts.writes[k])
        self.available.discard(int(self.cuts.graph.arrays.overwritten[k]))
