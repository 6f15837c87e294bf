"""``recoup.solve``: one door to every planner. The judge has the last word on whatever comes back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from recoup.errors import SettingError
from recoup.graph import Graph
from recoup.judge import simulate
from recoup.planners import registry
from recoup.planners.floor import cost_floor, memory_floor
from recoup.planners.reorder import other_orders
from recoup.schedule import Schedule
from recoup.solution import Solution, Status
from recoup.task import Clock, Finding, Progress, Scope, Task
from recoup.units import Budget, resolve_budget

TOLERANCE = 1e-8  # relative distance to a solver's bound at which a cost is called optimal: what it can tell apart
SMALLEST_BUDGET_SECONDS = 4.0  # spent at most to say which budget would work: for 3,000 ops, repair alone takes one


def solve(
    graph: Graph,
    budget: Budget = None,
    method: str = "auto",
    *,
    time_limit: float | None = 60.0,
    gap: float | None = None,
    seed: int = 0,
    solver: str = "highs",
    reorder: bool = False,
    start: Schedule | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """Find a schedule of ``graph`` within ``budget`` that costs as little as ``method`` can.

    The budget is bytes (an integer, or a string such as ``"6GiB"``) or a fraction of the peak without recomputation (a
    float, or ``"0.4"``); None sets no limit. The search ends at ``time_limit`` seconds, when the certified ``gap`` is
    small enough (by default 0.5 % for ``optimal``, 0 for the rest), or with Ctrl-C, and returns the best schedule so
    far. The same seed gives the same answer unless time ran out.

    ``reorder`` also looks for a better order of first runs, in what is left of the time; ``start`` is a schedule to
    begin from, such as that of a similar budget.

    >>> from recoup.generators import chain
    >>> solve(chain(8), budget=4).cost
    26
    """
    chosen = registry.get(method)
    gap = chosen.gap if gap is None else gap
    check_arguments(time_limit, seed, gap)
    base = simulate(graph, Schedule.default(graph))
    limit = resolve_budget(budget, base.peak_bytes)
    clock = Clock(time_limit)
    task = Task(graph, limit, chosen.name, clock, gap, seed, solver, progress, start)
    with clock.catching_ctrl_c():
        finding = chosen.plan(task)
        solution = _solution(task, finding, base.cost, base.peak_bytes)
        if reorder:
            solution = _reordered(solution, replace(task, clock=clock, best=None, bound=None, start=None))
    over_budget = solution.status == "infeasible" or (limit is not None and not finding.message)
    if solution.schedule is None and over_budget and not clock.interrupted:
        solution = _with_smallest_budget(solution)
    return replace(solution, seconds=clock.seconds())


def _reordered(solution: Solution, task: Task) -> Solution:
    """The solution of another first-run order, if there is one that costs less."""
    for other in other_orders(task.graph):
        if task.clock.stopped():
            break
        moved = replace(task, graph=other)
        registry.get(task.method).plan(moved)
        if moved.best is None or (solution.cost is not None and moved.best.cost >= solution.cost):
            continue
        schedule = Schedule.of(task.graph, moved.best.schedule.steps())
        found = replace(task, best=simulate(task.graph, schedule))
        solution = _solution(found, Finding(), solution.base_cost, solution.base_peak_bytes)
    return solution


def check_arguments(time_limit: float | None, seed: int, gap: float = 0.0) -> None:
    """Raise :class:`SettingError` unless the search can be run so."""
    if time_limit is not None and not 0 <= time_limit < math.inf:
        raise SettingError(f"a time limit of {time_limit!r} seconds means nothing; give 0 or more")
    if not 0 <= gap < 1:
        raise SettingError(f"a gap of {gap!r} means nothing; give a share such as 0.005")
    if not 0 <= seed < 2**31:
        raise SettingError(f"a seed of {seed!r} means nothing; give a whole number from 0 to 2147483647")


def _solution(task: Task, finding: Finding, base_cost: float, base_peak: int) -> Solution:
    best = task.best
    bound, scope, tolerance = _bound(task, finding)
    status: Status = "unknown"
    message = finding.message
    if best is not None:
        status = "optimal" if best.cost - bound <= tolerance * best.cost else "feasible"
        bound = min(bound, best.cost)
        if task.method != "min-memory":
            message = ""
    elif finding.infeasible:
        status, scope = "infeasible", finding.scope
    elif not message:
        message = _why_nothing(task)
    return Solution(
        status=status,
        scope=scope,
        method=task.method,
        graph=task.graph,
        schedule=None if best is None else best.schedule,
        cost=None if best is None else best.cost,
        peak_bytes=None if best is None else best.peak_bytes,
        base_cost=base_cost,
        base_peak_bytes=base_peak,
        budget_bytes=task.budget,
        lower_bound=None if status == "infeasible" else bound,
        seconds=task.clock.seconds(),
        seed=task.seed,
        message=message,
        interrupted=task.clock.interrupted,
    )


def _bound(task: Task, finding: Finding) -> tuple[float, Scope, float]:
    """The better of what the planner proved and what holds for every schedule, and how exact that is."""
    trivial = cost_floor(task.graph)
    if finding.lower_bound is None or finding.lower_bound <= trivial:
        return trivial, "any", 0.0
    return finding.lower_bound, finding.scope, TOLERANCE


def _why_nothing(task: Task) -> str:
    if task.clock.stopped():
        return "nothing found in time"
    return f"{task.method} has no schedule that fits"


def _with_smallest_budget(solution: Solution) -> Solution:
    """Say which budget would work, and below which none does."""
    smallest = solve(solution.graph, None, "min-memory", time_limit=SMALLEST_BUDGET_SECONDS)
    return replace(solution, smallest_budget=smallest.peak_bytes, budget_bound=memory_floor(solution.graph).bytes)
