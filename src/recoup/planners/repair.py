"""Upper bounds: bring a schedule within budget, and make it cheaper, by adding and removing extra runs.

Repair is greedy: while over budget, among the values that cross the peak without being used there, drop the one that
frees most for the time it takes to make it again before its next use. Improvement ruins and repairs: remove a few extra
runs, repair what that breaks, remove what is no longer needed, and keep the result if it is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from recoup.arrays import Ints
from recoup.errors import ScheduleError
from recoup.graph import Graph
from recoup.judge import Instances, lifetimes, memory_curve
from recoup.planners.extras import Runs

AT_ONCE = 500  # ops from which on several values are dropped at a time, with the square of their number
LOOK = 500  # what judging costs besides its steps, in steps


@dataclass
class Repairer:
    """Repairs and improves schedules of one graph for one budget."""

    graph: Graph
    budget: int
    seed: int = 0
    stopped: Callable[[], bool] = lambda: False
    work: int = 0  # done so far, in steps judged: how long things take, but the same every time

    def __post_init__(self) -> None:
        a = self.graph.arrays
        self.n = len(self.graph.ops)
        self.rng = np.random.default_rng(self.seed)
        self.reads = [a.inputs[k].tolist() for k in range(len(a.times))]
        self.touches = [set(self.reads[k]) | set(a.outputs[k].tolist()) for k in range(len(a.times))]
        self.maker = {d: k for k in range(len(a.times) - 1, -1, -1) for d in a.outputs[k].tolist()}
        self.times = np.array(a.times, dtype=np.float64)
        self.fixed = a.required | ((a.producer >= 0) & np.append(a.once, False)[a.producer])

    def cost(self, runs: Runs) -> float:
        """The cost of the runs."""
        return float(self.times[runs.kernel].sum())

    def memory(self, runs: Runs) -> tuple[Instances, Ints] | None:
        """Lifetimes and memory per step; None if an in-place run destroyed what another needs."""
        self.work += len(runs.kernel) + LOOK
        try:
            alive = lifetimes(self.graph, runs.kernel)
        except ScheduleError:
            return None
        return alive, memory_curve(self.graph, runs.kernel, alive)

    def fits(self, runs: Runs) -> bool:
        """Whether the schedule is valid and within budget."""
        found = self.memory(runs)
        return found is not None and (not len(found[1]) or int(found[1].max()) <= self.budget)

    # Repair ------------------------------------------------------------------------------------------------------

    def repair(self, runs: Runs, noise: float = 0.0) -> Runs | None:
        """Add extra runs until the schedule fits; None if that fails."""
        for _ in range(20 * self.n + 100):
            found = self.memory(runs)
            if found is None or self.stopped():
                return None
            alive, memory = found
            peak = int(np.argmax(memory))
            if memory[peak] <= self.budget:
                return runs
            more = self._drop(runs, alive, peak, int(memory[peak]) - self.budget, noise)
            if not more:
                return None
            runs = runs.with_runs([number for number, _ in more], [kernel for _, kernel in more])
        return None

    def _drop(self, runs: Runs, alive: Instances, peak: int, excess: int, noise: float) -> list[tuple[int, int]]:
        """The extra runs that make again, before their next use, the values best dropped at the peak.

        One value at a time, for the next choice depends on the last; in large graphs a few, before looking again.
        """
        a = self.graph.arrays
        crossing = np.flatnonzero((alive.first < peak) & (alive.last > peak) & ~self.fixed[alive.value])
        here = self.touches[int(runs.kernel[peak])]
        uses = _Uses.of(self.graph, runs.kernel, alive)
        found: list[tuple[float, int, list[tuple[int, int]]]] = []
        for d in alive.value[crossing].tolist():
            size = int(a.bytes[d])
            if d in here or size == 0:
                continue
            more, cost = self._remake(runs, uses, d, peak)
            if more:
                worth = min(size, excess) / max(cost, 1e-12)
                if noise:
                    worth *= math.exp(noise * self.rng.standard_normal())
                found.append((-worth, size, more))
        found.sort(key=lambda choice: choice[0])
        best: list[tuple[int, int]] = []
        freed = 0
        for _, size, more in found[: max(1, int((self.n / AT_ONCE) ** 2))]:
            best += more
            freed += size
            if freed >= excess // 2:
                break
        return best

    def _remake(self, runs: Runs, uses: _Uses, d: int, peak: int) -> tuple[list[tuple[int, int]], float]:
        """Runs that make ``d`` again after the peak and before its next use, with what of their inputs is gone."""
        a = self.graph.arrays
        stage = int(runs.number[uses.next_use(d, peak)]) // self.n
        after = int(runs.number[peak])
        chosen: dict[int, int] = {}
        cost = 0.0
        waiting = [d]
        while waiting:
            value = waiting.pop()
            k = self.maker[value]
            number = stage * self.n + int(a.op[k])
            if number in chosen:
                continue
            if number <= after or a.once[a.op[k]]:
                return [], 0.0
            chosen[number] = k
            cost += self.times[k]
            at = int(np.searchsorted(runs.number, number))
            waiting += [e for e in self.reads[k] if not uses.reaches(e, at, peak)]
        return list(chosen.items()), cost

    # Improvement -------------------------------------------------------------------------------------------------

    def prune(self, runs: Runs) -> Runs:
        """Remove extra runs that are not needed, the dearest first, in blocks that are split where they are needed."""
        extra = runs.extra()
        order = extra[np.argsort(-self.times[runs.kernel[extra]], kind="stable")]
        numbers = runs.number[order].tolist()
        size = max(1, len(numbers) // 64)
        blocks = [numbers[i : i + size] for i in range(0, len(numbers), size)][::-1]
        while blocks and not self.stopped():
            block = blocks.pop()
            fewer = runs.without(np.searchsorted(runs.number, block))
            if self.fits(fewer):
                runs = fewer
            elif len(block) > 1:
                half = len(block) // 2
                blocks += [block[half:], block[:half]]
        return runs

    def choose(self, runs: Runs) -> Runs:
        """Take a faster implementation wherever that still fits."""
        first = self.graph.arrays.first_kernel
        for position, k in enumerate(runs.kernel.tolist()):
            i = int(self.graph.arrays.op[k])
            faster = [other for other in range(int(first[i]), int(first[i + 1])) if self.times[other] < self.times[k]]
            for other in sorted(faster, key=lambda kernel: self.times[kernel]):
                kernels = runs.kernel.copy()
                kernels[position] = other
                if self.fits(Runs(self.graph, runs.number, kernels)):
                    runs = Runs(self.graph, runs.number, kernels)
                    break
        return runs

    def ruin(self, runs: Runs) -> Runs:
        """Remove a few extra runs: of neighbouring stages, of one op and what it reads, or any."""
        extra = runs.extra()
        if not len(extra):
            return runs
        count = 1 + int(self.rng.geometric(0.35))
        centre = int(self.rng.choice(extra))
        kind = self.rng.random()
        if kind < 0.4:
            near = extra[np.argsort(np.abs(extra - centre), kind="stable")[:count]]
        elif kind < 0.7:
            op = runs.number[extra] % self.n
            near = extra[np.argsort(np.abs(op - runs.number[centre] % self.n), kind="stable")[:count]]
        else:
            near = self.rng.choice(extra, min(count, len(extra)), replace=False)
        return runs.without(near)

    def improve(self, runs: Runs, effort: float = math.inf) -> Runs:
        """Ruin and repair until ``effort`` steps have been judged, accepting a little worse now and then; the best."""
        best = now = runs
        best_cost = now_cost = self.cost(runs)
        slack = 0.0005 * best_cost
        began = self.work
        while self.work - began < effort and len(now.extra()) and not self.stopped():
            fixed = self.repair(self.ruin(now), noise=0.5)
            if fixed is None or self.cost(fixed) > now_cost + 4 * slack:
                continue
            fixed = self.prune(fixed)
            cost = self.cost(fixed)
            if cost <= now_cost + slack * self.rng.exponential():
                now, now_cost = fixed, cost
            if cost < best_cost:
                best, best_cost = fixed, cost
        return best


@dataclass(frozen=True)
class _Uses:
    """Where values are read and made, to ask quickly."""

    steps: int
    read: Ints  # value * (steps + 1) + step of every read, sorted
    made: Ints  # value * (steps + 1) + step of every instance, sorted
    last: Ints  # per instance

    @staticmethod
    def of(graph: Graph, kernels: Ints, alive: Instances) -> _Uses:
        steps = len(kernels)
        value, step = graph.arrays.inputs.gather(kernels)
        read = np.sort(value * (steps + 1) + step)
        return _Uses(steps, read, alive.value * (steps + 1) + alive.first, alive.last)

    def next_use(self, d: int, step: int) -> int:
        """The first step after ``step`` that reads ``d``."""
        return int(self.read[np.searchsorted(self.read, d * (self.steps + 1) + step + 1)]) - d * (self.steps + 1)

    def reaches(self, d: int, at: int, peak: int) -> bool:
        """Whether ``d`` can be read at step ``at`` without crossing the peak for it."""
        j = int(np.searchsorted(self.made, d * (self.steps + 1) + at)) - 1
        return int(self.last[j]) > peak
