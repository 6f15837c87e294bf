"""From a point of the cut relaxation to a schedule: in each period, recompute what is needed as late as possible.

Just before each first run, what it needs and is gone is made again from what is there, in the listed order: the
program's own order keeps little alive at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

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
        for u in sorted(self.first):
            k = self.first[u]
            cut = self.period < len(self.live) and u == self.cuts.cuts[self.period]
            carried = {d for d in self.live[self.period] if a.producer[d] < u} if cut else set()
            for again in self._missing([*self.cuts.reads[k], *sorted(carried)]):
                if not self._run(again):
                    return None
            if cut:
                self.available &= self.live[self.period] | {d for d in self.available if a.once[a.producer[d]]}
                self.period += 1
            if not self._run(k):
                return None
        return Schedule(self.cuts.graph, np.array(self.runs, dtype=np.int64))

    def _missing(self, values: Iterable[int]) -> list[int]:
        """The kernels that make the values available, in the listed order."""
        kernels: set[int] = set()
        waiting = [d for d in values if d not in self.available]
        while waiting:
            k = self._kernel(waiting.pop())
            if k not in kernels:
                kernels.add(k)
                waiting += [d for d in self.cuts.reads[k] if d not in self.available]
        return sorted(kernels)

    def _kernel(self, d: int) -> int:
        makers = self.cuts.makers[d]
        planned = [k for k in makers if (self.period, k) in self.again]
        return planned[0] if planned else makers[0]

    def _run(self, k: int) -> bool:
        """Run a kernel; False if what it reads is not there, or if it may not run again."""
        a = self.cuts.graph.arrays
        if not self.available.issuperset(self.cuts.reads[k]):
            return False
        if a.once[a.op[k]] and any(other in self.runs for other in self.cuts.kernels[a.op[k]]):
            return False
        self.runs.append(k)
        self.available.update(self.cuts.writes[k])
        self.available.discard(int(a.overwritten[k]))
        return True
