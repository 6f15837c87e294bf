"""Maximum batch size (section 6.4): the largest batch that fits, at a bounded extra cost.

For one schedule memory is linear in the batch, step by step, so its largest batch is a division: equation (11) for the
baselines, minimised over their settings. For the planners that search, batches are bisected; each is problem (9) with
sizes multiplied by the batch and equation (10) as a constraint, which is where Checkmate had a quadratic program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from recoup.errors import BudgetError, GraphError, SettingError
from recoup.graph import Graph
from recoup.judge import cost_of, simulate
from recoup.planners import registry
from recoup.planners.floor import memory_floor
from recoup.schedule import Schedule
from recoup.solving import check_arguments
from recoup.task import Clock, Finding, NotApplicableError, Scope, Task
from recoup.units import Budget, resolve_budget

LARGEST = 2**40  # no batch is larger: where this fits, nothing of note scales


@dataclass(frozen=True)
class BatchSize:
    """The largest batch a method reaches; 0 if not even one fits. ``upper_bound`` holds for every schedule in scope."""

    method: str
    batch: int
    upper_bound: int
    scope: Scope
    schedule: Schedule | None
    cost: float | None
    cost_limit: float | None
    budget_bytes: int
    seconds: float
    message: str = ""
    interrupted: bool = False


def max_batch(
    graph: Graph,
    budget: Budget,
    method: str = "auto",
    *,
    max_extra: float | None = 1.0,
    time_limit: float | None = 60.0,
    seed: int = 0,
    solver: str = "highs",
) -> BatchSize:
    """The largest multiple of the graph's own batch that ``method`` fits into ``budget`` bytes.

    Values grow with the batch unless marked otherwise, resident memory in its scaling part, workspaces always. The
    cost, of one batch, stays within ``max_extra`` forward passes over running everything once: 1 is equation (10), None
    is no limit.
    """
    room = resolve_budget(budget, 0) if not isinstance(budget, float) else None
    if not room:
        raise BudgetError(f"{budget!r}: a maximum batch needs a budget in bytes, as in '16GiB'")
    if max_extra is not None and not 0 <= max_extra < math.inf:
        raise SettingError(f"max_extra is a number of forward passes, or None, not {max_extra!r}")
    check_arguments(time_limit, seed)
    if not any(v.scales and v.bytes for v in graph.values) and not graph.resident_scaling_bytes:
        raise GraphError("nothing in this graph scales with the batch")
    search = _Search(
        graph, room, registry.get(method).name, _cost_limit(graph, max_extra), Clock(time_limit), seed, solver
    )
    with search.clock.catching_ctrl_c():
        return search.run()


def _cost_limit(graph: Graph, max_extra: float | None) -> float | None:
    """Equation (10)."""
    if max_extra is None:
        return None
    forward = sum(op.time for op in graph.ops if op.phase == "forward" and not op.optional)
    return cost_of(graph, Schedule.default(graph)) + max_extra * forward


def largest_batch(graph: Graph, schedule: Schedule, budget: int) -> int:
    """Equation (11), step by step: the largest batch at which this schedule stays within ``budget``."""
    at_one = simulate(graph, schedule).memory
    empty = graph.scaled(0)
    fixed = simulate(empty, Schedule(empty, schedule.kernels)).memory
    growing = at_one - fixed
    if np.any(fixed > budget):
        return 0
    grows = growing > 0
    return int(((budget - fixed[grows]) // growing[grows]).min(initial=LARGEST))


@dataclass
class _Search:
    graph: Graph
    budget: int
    method: str
    cost_limit: float | None
    clock: Clock
    seed: int
    solver: str
    batch: int = 0
    schedule: Schedule | None = None

    def run(self) -> BatchSize:
        chosen = registry.get(self.method)
        upper, message = self._floor_batch(), ""
        scope: Scope = "any"
        try:
            if chosen.family:
                for schedule in chosen.candidates(self.graph):
                    self._consider(schedule)
                    if self.clock.stopped():
                        break
            elif self.method == "lp":
                raise NotApplicableError("it gives no schedule")
            else:
                upper, scope = self._bisect(upper)
        except NotApplicableError as problem:
            message = f"{self.method} does not apply: {problem}"
        return BatchSize(
            method=self.method,
            batch=self.batch,
            upper_bound=upper,
            scope=scope,
            schedule=self.schedule,
            cost=None if self.schedule is None else cost_of(self.graph, self.schedule),
            cost_limit=self.cost_limit,
            budget_bytes=self.budget,
            seconds=self.clock.seconds(),
            message=message,
            interrupted=self.clock.interrupted,
        )

    def _consider(self, schedule: Schedule) -> None:
        if self.cost_limit is not None and cost_of(self.graph, schedule) > self.cost_limit:
            return
        batch = largest_batch(self.graph, schedule, self.budget)
        if batch > self.batch:
            self.batch, self.schedule = batch, schedule

    def _floor_batch(self) -> int:
        """The largest batch at which no single op is over budget."""
        low, high = 0, 1
        while high < LARGEST and memory_floor(self.graph.scaled(high)).bytes <= self.budget:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if memory_floor(self.graph.scaled(middle)).bytes <= self.budget:
                low = middle
            else:
                high = middle
        return low

    def _bisect(self, upper: int) -> tuple[int, Scope]:
        """Close in on the largest batch; returns what is proven to be an upper bound, and for which schedules."""
        proven = upper
        scope: Scope = "any"
        self._consider(Schedule.default(self.graph))
        while self.batch < upper and not self.clock.stopped():
            batch = (self.batch + upper + 1) // 2
            finding, best = self._try(batch, rounds=(upper - self.batch).bit_length())
            if best is not None:
                self._consider(Schedule(self.graph, best.kernels))
                continue
            upper = batch - 1
            if finding.infeasible and upper < proven:
                proven, scope = upper, finding.scope
        return max(proven, self.batch), scope

    def _try(self, batch: int, rounds: int) -> tuple[Finding, Schedule | None]:
        """One bisection step, with its share of the time that is left."""
        clock = self.clock.share(rounds)
        task = Task(self.graph.scaled(batch), self.budget, self.method, clock, 0.99, self.seed, self.solver)
        task.cost_limit = self.cost_limit
        finding = registry.get(self.method).plan(task)
        return finding, None if task.best is None else task.best.schedule
