"""The whole trade-off between cost and memory, in one call.

Budgets are shared out over the cores in neighbouring runs; within a run each begins from the schedule of the one before
it. Afterwards neighbours help each other once more: what fits a budget fits every larger one, and no budget is cheaper
than a larger one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from recoup.errors import BudgetError
from recoup.graph import Graph
from recoup.judge import simulate
from recoup.planners import registry
from recoup.schedule import Schedule
from recoup.solution import Solution
from recoup.solving import solve
from recoup.task import Clock
from recoup.units import Budget, resolve_budget


def curve(
    graph: Graph,
    budgets: Sequence[Budget],
    methods: Sequence[str] = ("optimal",),
    *,
    time_limit: float | None = 60.0,
    gap: float | None = None,
    seed: int = 0,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[Solution]]:
    """Solve every method at every budget, each within ``time_limit``; solutions come by method, largest budget first.

    ``progress`` hears how many of how many are done. Ctrl-C returns what is there.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed

    plain = simulate(graph, Schedule.default(graph)).peak_bytes
    limits = sorted({resolve_budget(budget, plain) or plain for budget in budgets}, reverse=True)
    if not limits:
        raise BudgetError("a curve needs at least one budget")
    names = [registry.get(method).name for method in methods]
    workers = workers or _cores()
    jobs = [(name, part) for name in names for part in _runs(limits, workers)]
    found: dict[str, list[Solution]] = {name: [] for name in names}
    clock = Clock(None)
    with (
        ProcessPoolExecutor(min(workers, len(jobs)), mp_context=multiprocessing.get_context("spawn")) as pool,
        clock.catching_ctrl_c(),
    ):
        waiting = [pool.submit(_solve_run, graph, name, part, time_limit, gap, seed) for name, part in jobs]
        for done in as_completed(waiting):
            name, solutions = done.result()
            found[name] += solutions
            if progress is not None:
                progress(sum(map(len, found.values())), len(limits) * len(names))
            if clock.interrupted:
                for job in waiting:
                    job.cancel()
                break
    return {name: _share(sorted(found[name], key=_limit, reverse=True)) for name in names}


def parse_budgets(text: str) -> list[Budget]:
    """``'0.2:1.0:0.05'`` (from, to, step), or a list such as ``'4GiB,5GiB,0.9'``."""
    parts = text.split(":")
    if len(parts) == 1:
        return list(text.split(","))
    try:
        first, last, step = (Fraction(part) for part in parts)
    except (ValueError, ZeroDivisionError):
        raise BudgetError(f"{text!r}: write budgets as first:last:step, as in 0.2:1.0:0.05, or as a list") from None
    if not (0 < first <= last <= 1 and step > 0 and (last - first) / step <= 1000):
        raise BudgetError(f"{text!r}: fractions go from above 0 to 1 in at most 1000 steps, as in 0.2:1.0:0.05")
    return [str(float(first + k * step)) for k in range(int((last - first) / step) + 1)]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _limit(solution: Solution) -> int:
    return solution.budget_bytes or 0


def _runs(limits: list[int], workers: int) -> Iterator[list[int]]:
    """Neighbouring budgets, in about as many runs as there are workers."""
    size = -(-len(limits) // workers)
    for begin in range(0, len(limits), size):
        yield limits[begin : begin + size]


def _solve_run(
    graph: Graph, method: str, limits: list[int], time_limit: float | None, gap: float | None, seed: int
) -> tuple[str, list[Solution]]:
    solutions: list[Solution] = []
    start: Schedule | None = None
    for limit in limits:
        solution = solve(graph, limit, method, time_limit=time_limit, gap=gap, seed=seed, start=start)
        solutions.append(solution)
        start = solution.schedule or start
        if solution.interrupted:
            break
    return method, solutions


def _share(solutions: list[Solution]) -> list[Solution]:
    """Give each budget the schedules of the smaller ones and the bounds of the larger ones, largest budget first."""
    best: Solution | None = None
    cheaper: list[Solution] = []
    for solution in reversed(solutions):
        if best is not None and best.cost is not None and (solution.cost is None or best.cost < solution.cost):
            fields = {"schedule": best.schedule, "cost": best.cost, "peak_bytes": best.peak_bytes, "status": "feasible"}
            solution = replace(solution, **fields)  # type: ignore[arg-type]
        best = solution if solution.cost is not None else best
        cheaper.append(solution)
    bound: float | None = None
    shared: list[Solution] = []
    for solution in reversed(cheaper):
        if solution.scope == "any" and solution.lower_bound is not None:
            bound = max(bound or 0.0, solution.lower_bound)
            solution = replace(solution, lower_bound=bound)
        shared.append(solution)
    return shared
