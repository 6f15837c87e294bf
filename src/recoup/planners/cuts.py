"""The cut-point relaxation: memory written down only at the few moments that matter.

Choose a few ops as cuts t_1 < ... < t_K. Period c begins after the first run of t_c and ends with the first run of
t_{c+1}, or with the schedule; period 0 is what comes before t_1.

    S[c, d]   value d is live while t_c runs for the first time
    R[c, k]   kernel k (an op in one implementation) runs again in period c
    F[k]      kernel k is the first run of its op; only ops with a choice have such variables

    minimise  sum of time * F + sum of time * R
    memory    sum of bytes * S[c] + workspace of t_c <= budget - resident
    need      what a first run in period c reads is live at the cut or made again in period c
    closure   so is what a run of R[c] reads
    carry     what is live at the next cut is live at this one or made again in between

Every schedule with the graph's first-run order satisfies these rows, however often it recomputes, so the optimum is a
lower bound for all of them. Values and ops that nothing after the cut depends on get no variables. A value that an op
without choices makes by its first run within a period is there for the rest of it as far as these rows know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from recoup.graph import Graph
from recoup.judge import Simulation
from recoup.solvers.program import Floats, Program

Terms = list[tuple[int, float]]

ANCESTORS = 12  # ops looked at behind a watched one


@dataclass
class CutProgram:
    """The relaxation for one graph, budget and set of cuts; period ``c`` follows cut ``c - 1``."""

    graph: Graph
    room: int  # budget less the resident part
    cuts: list[int]  # ops that must run, in order
    watched: list[int] = field(default_factory=list)  # ops whose reruns are given their memory too
    closely: list[int] = field(default_factory=list)  # those of them that are also given what was made for their sake
    program: Program = field(default_factory=Program)
    S: dict[tuple[int, int], int] = field(default_factory=dict)  # (cut, value)
    R: dict[tuple[int, int], int] = field(default_factory=dict)  # (period, kernel)
    F: dict[int, int] = field(default_factory=dict)  # kernel
    R2: dict[tuple[int, int], int] = field(default_factory=dict)  # (period, kernel): runs again twice
    derived: list[tuple[int, Terms, float]] = field(default_factory=list)  # columns that are at least such a sum

    def __post_init__(self) -> None:
        a = self.graph.arrays
        self.byte_unit = max(self.room, 1) / 100.0
        self.time_unit = (math.fsum(a.times[int(k)] for k in a.first_kernel[:-1]) or 1.0) / 100.0
        self.kernels = [range(int(b), int(e)) for b, e in zip(a.first_kernel[:-1], a.first_kernel[1:], strict=True)]
        self.reads = [a.inputs[k].tolist() for k in range(len(a.times))]
        self.writes = [a.outputs[k].tolist() for k in range(len(a.times))]
        self.makers: dict[int, list[int]] = {}
        for k, values in enumerate(self.writes):
            for d in values:
                self.makers.setdefault(d, []).append(k)
        self._first_runs()
        for period in range(len(self.cuts) + 1):
            self._columns(period)
        for cut in range(len(self.cuts)):
            self._memory(cut)
        for period in range(len(self.cuts) + 1):
            self._rows(period)
        self._required()
        self._once()
        for period in range(1, len(self.cuts)):
            self._reruns(period)

    # Columns -----------------------------------------------------------------------------------------------------

    def _first_runs(self) -> None:
        a, p = self.graph.arrays, self.program
        certain = 0.0
        for i, kernels in enumerate(self.kernels):
            if a.mandatory[i] and len(kernels) == 1:
                certain += a.times[kernels[0]]
                continue
            for k in kernels:
                self.F[k] = p.column(a.times[k] / self.time_unit)
            terms = [(self.F[k], 1.0) for k in kernels]
            p.row(terms, lower=float(a.mandatory[i]), upper=1.0)
        p.column(certain / self.time_unit, lower=1.0)  # a constant, so that gaps are on the whole cost

    def _columns(self, period: int) -> None:
        a, p = self.graph.arrays, self.program
        low, high = self.span(period)
        again: list[int] = []
        if period:
            ops, values = self._useful(low)
            here = {d for k in self.kernels[low] for d in (*self.reads[k], *self.writes[k])}
            for d in sorted(values | here | self._held(low)):
                self.S[period - 1, d] = p.column()
            again += ops
        again += [i for i in range(low + 1, high + 1) if len(self.kernels[i]) > 1]
        for i in again:
            if not a.once[i] or not a.mandatory[i]:  # what is optional may also run for the first time here
                for k in self.kernels[i]:
                    self.R[period, k] = p.column(a.times[k] / self.time_unit)

    def _useful(self, t: int) -> tuple[list[int], set[int]]:
        """Ops up to ``t`` that some later op depends on, and the values through which it does."""
        a = self.graph.arrays
        values = {d for k in range(int(a.first_kernel[t + 1]), len(self.reads)) for d in self.reads[k]}
        values = {d for d in values if a.producer[d] <= t}
        ops: list[int] = []
        for i in range(t, -1, -1):
            if any(d in values for k in self.kernels[i] for d in self.writes[k]):
                ops.append(i)
                values.update(d for k in self.kernels[i] for d in self.reads[k])
        return ops[::-1], values

    def _held(self, t: int) -> set[int]:
        """Required outputs that have certainly been made by the time ``t`` runs."""
        a = self.graph.arrays
        return {d for d in np.flatnonzero(a.required).tolist() if a.producer[d] <= t and self._certain(d)}

    def _certain(self, d: int) -> bool:
        """Whether the first run of its op makes the value, whatever is chosen."""
        i = int(self.graph.arrays.producer[d])
        return bool(self.graph.arrays.mandatory[i]) and len(self.makers[d]) == len(self.kernels[i])

    # Rows --------------------------------------------------------------------------------------------------------

    def _memory(self, cut: int) -> None:
        """What is live while the cut's op runs, with its workspace, is within the budget."""
        a, p, t = self.graph.arrays, self.program, self.cuts[cut]
        size = a.bytes / self.byte_unit
        terms: Terms = [(column, size[d]) for (c, d), column in self._at(cut)]
        spare = self.room / self.byte_unit
        for d in self._held(t):
            p.lower[self.S[cut, d]] = 1.0
        for k in self.kernels[t]:
            workspace = float(a.workspace[k]) / self.byte_unit
            over = int(a.overwriting[k])
            extra = workspace - (size[over] if over >= 0 else 0.0)
            chosen = self.F.get(k)
            if chosen is None:
                spare -= extra
            else:
                terms.append((chosen, extra))
            for d in {*self.reads[k], *self.writes[k]}:
                if chosen is None:
                    p.lower[self.S[cut, d]] = 1.0
                else:
                    p.row([(self.S[cut, d], 1.0), (chosen, -1.0)], lower=0.0)
        p.row(terms, upper=spare)

    def _at(self, cut: int) -> Iterator[tuple[tuple[int, int], int]]:
        return ((key, column) for key, column in self.S.items() if key[0] == cut)

    def _rows(self, period: int) -> None:
        low, high = self.span(period)
        wanted: set[int] = set()
        for u in range(low + 1, high + 1):  # need
            for k in self.kernels[u]:
                for d in self.reads[k]:
                    if k in self.F:
                        self._require(period, d, self.F[k])
                    elif d not in wanted:
                        wanted.add(d)
                        self._require(period, d, None)
        for (c, k), again in self.R.items():  # closure
            if c == period:
                for d in self.reads[k]:
                    self._require(period, d, again)
        if period < len(self.cuts):  # carry
            for (_, d), column in self._at(period):
                if self.program.lower[column] < 1.0 or d not in self.writes[self.kernels[high][0]]:
                    self._require(period, d, column)

    def _require(self, period: int, d: int, demand: int | None) -> None:
        """Value ``d`` is there at some time of the period if ``demand`` is 1, or in any case."""
        low, _ = self.span(period)
        a = self.graph.arrays
        source = int(a.producer[d])
        terms: Terms = [(self.R[period, k], 1.0) for k in self.makers[d] if (period, k) in self.R]
        if source > low:
            if self._certain(d):
                return
            terms += [(self.F[k], 1.0) for k in self.makers[d]]
        else:
            terms += self._after_cut(period - 1, d)
        if demand is not None:
            terms.append((demand, -1.0))
        self.program.row(terms, lower=0.0 if demand is not None else 1.0)

    def _after_cut(self, cut: int, d: int) -> Terms:
        """Value ``d`` is live when the cut's op has run: live while it ran, and not overwritten by it."""
        if (cut, d) not in self.S:
            return []
        terms: Terms = [(self.S[cut, d], 1.0)]
        for k in self.kernels[self.cuts[cut]]:
            if self.graph.arrays.overwritten[k] == d:
                if k not in self.F:
                    return []
                terms.append((self.F[k], -1.0))
        return terms

    def _reruns(self, period: int) -> None:
        """A watched op that runs again in a period runs beside what is live then.

        A value made before the period, live at its end and not made again in it, is live all along: P >= S - R. So if
        kernel k runs again, what it reads and writes, its workspace and P have to fit together. A value that had to be
        made again for k's sake and is live at the end is there too, unless its op runs twice: see ``_beside``.
        """
        a, p = self.graph.arrays, self.program
        low, _ = self.span(period)
        again = [k for i in self.watched for k in self.kernels[i] if i <= low and (period, k) in self.R]
        if not again:
            return
        size = a.bytes / self.byte_unit
        stays: dict[int, int] = {}
        for (_, d), column in self._at(period):
            if a.producer[d] <= low:
                stays[d] = p.column(integer=False)
                runs = [(self.R[period, k], 1.0) for k in self.makers[d] if (period, k) in self.R]
                p.row([(stays[d], 1.0), (column, -1.0), *runs], lower=0.0)
                self.derived.append((stays[d], [(column, 1.0), *((r, -1.0) for r, _ in runs)], 0.0))
        for k in again:
            own = {*self.reads[k], *self.writes[k]}
            need = sum(size[d] for d in own) + float(a.workspace[k]) / self.byte_unit
            need -= size[a.overwriting[k]] if a.overwriting[k] >= 0 else 0.0
            live = stays | (self._beside(period, k, stays) if a.op[k] in self.closely else {})
            terms = [(column, size[d]) for d, column in live.items() if d not in own]
            p.row([*terms, (self.R[period, k], need)], upper=self.room / self.byte_unit)

    def _beside(self, period: int, k: int, stays: dict[int, int]) -> dict[int, int]:
        """Values made again for the sake of kernel k, live at the end of the period: live while k runs, or made twice.

        B: the op ran in the period before k did. It did if k, or an op that ran before k for the same reason, reads a
        value of it that was not live after the cut: B >= R[k] - S, or B >= B' - S. Then a value of it that is live at
        the end, S', was live while k ran unless the op ran again later: Q >= S' + B - 1 - twice.
        """
        a, p = self.graph.arrays, self.program
        beside: dict[int, int] = {}
        ran: dict[int, int] = {}
        waiting = [(self.R[period, k], d) for d in self.reads[k]]
        while waiting and len(ran) < ANCESTORS:
            because, d = waiting.pop(0)
            i = int(a.producer[d])
            kernel = self.kernels[i][0]
            if len(self.kernels[i]) > 1 or i > self.span(period)[0] or (period, kernel) not in self.R:
                continue
            new = i not in ran
            if new:
                ran[i] = p.column(integer=False)
            there = self._after_cut(period - 1, d)
            p.row([(ran[i], 1.0), (because, -1.0), *there], lower=0.0)
            self.derived.append((ran[i], [(because, 1.0), *((s, -c) for s, c in there)], 0.0))
            if not new:
                continue
            waiting += [(ran[i], e) for e in self.reads[kernel]]
            for e in self.writes[kernel]:
                if e in stays and e not in beside:
                    end, twice = self.S[period, e], self._twice(period, kernel)
                    beside[e] = p.column(integer=False)
                    p.row([(beside[e], 1.0), (stays[e], -1.0)], lower=0.0)
                    p.row([(beside[e], 1.0), (end, -1.0), (ran[i], -1.0), (twice, 1.0)], lower=-1.0)
                    self.derived.append((beside[e], [(stays[e], 1.0)], 0.0))
                    self.derived.append((beside[e], [(end, 1.0), (ran[i], 1.0), (twice, -1.0)], -1.0))
        return beside

    def _twice(self, period: int, k: int) -> int:
        """Kernel k runs at least twice more in the period, and is paid for once more."""
        if (period, k) not in self.R2:
            self.R2[period, k] = self.program.column(self.graph.arrays.times[k] / self.time_unit)
        return self.R2[period, k]

    def _required(self) -> None:
        """Required outputs that depend on a choice are made at some time, and stay."""
        for d in np.flatnonzero(self.graph.arrays.required).tolist():
            if self._certain(d):
                continue
            makers = [self.F[k] for k in self.makers[d]]
            makers += [self.R[key] for key in self.R if key[1] in self.makers[d]]
            self.program.row([(column, 1.0) for column in makers], lower=1.0)
            for (_, value), column in self.S.items():
                if value == d:
                    for k in self.makers[d]:
                        self.program.row([(column, 1.0), (self.F[k], -1.0)], lower=0.0)

    def _once(self) -> None:
        """Optional ops that run at most once do so at their place in the order or later, not both."""
        a = self.graph.arrays
        for i in np.flatnonzero(a.once & ~a.mandatory).tolist():
            runs = [self.F[k] for k in self.kernels[i]]
            runs += [column for (_, k), column in self.R.items() if k in self.kernels[i]]
            self.program.row([(column, 1.0) for column in runs], upper=1.0)

    # From and to schedules ---------------------------------------------------------------------------------------

    def span(self, period: int) -> tuple[int, int]:
        """The first runs of a period are those of the ops after the first number, up to the second."""
        low = self.cuts[period - 1] if period else -1
        high = self.cuts[period] if period < len(self.cuts) else len(self.kernels) - 1
        return low, high

    def live(self, x: Floats) -> list[set[int]]:
        """For each cut, the values live while its op runs."""
        sets: list[set[int]] = [set() for _ in self.cuts]
        for (cut, d), column in self.S.items():
            if x[column] > 0.5:
                sets[cut].add(d)
        return sets

    def chosen(self, x: Floats) -> dict[int, int]:
        """The kernel of each op's first run; optional ops that are left out are absent."""
        choice = {i: kernels[0] for i, kernels in enumerate(self.kernels) if kernels[0] not in self.F}
        for k, column in self.F.items():
            if x[column] > 0.5:
                choice[int(self.graph.arrays.op[k])] = k
        return choice

    def again(self, x: Floats) -> set[tuple[int, int]]:
        """The (period, kernel) pairs that run again."""
        return {key for key, column in self.R.items() if x[column] > 0.5}

    def point(self, judged: Simulation) -> Floats:
        """The point of a schedule with this first-run order, to start the solver from."""
        a = self.graph.arrays
        x = np.array(self.program.lower)
        kernels = judged.schedule.kernels.tolist()
        first: dict[int, int] = {}
        period = 0
        for step, k in enumerate(kernels):
            i = int(a.op[k])
            if i in first:
                if (period, k) in self.R:
                    if x[self.R[period, k]] and (period, k) in self.R2:
                        x[self.R2[period, k]] = 1.0
                    x[self.R[period, k]] = 1.0
                continue
            first[i] = step
            if k in self.F:
                x[self.F[k]] = 1.0
            if period < len(self.cuts) and i == self.cuts[period]:
                period += 1
        alive = judged.instances
        for cut, t in enumerate(self.cuts):
            step = first[t]
            now = (alive.first <= step) & (step <= alive.last)
            for d in alive.value[now].tolist():
                if (cut, d) in self.S:
                    x[self.S[cut, d]] = 1.0
        for column, terms, constant in self.derived:
            x[column] = max(x[column], constant + sum(coefficient * x[other] for other, coefficient in terms))
        return x
