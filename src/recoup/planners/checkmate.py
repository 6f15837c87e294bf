"""Checkmate: the integer program of section 4, solved to proven optimality.

``checkmate`` is problem (9), ``checkmate-unpartitioned`` problem (1) with the memory of section 4.4; the program itself
is in :mod:`recoup.planners.stages`. The search starts from the best baseline that fits, as the program's feasible set
contains them all.
"""

from __future__ import annotations

import math
from functools import reduce

from recoup import solvers
from recoup.planners import registry
from recoup.planners.floor import memory_floor
from recoup.planners.stages import StageProgram
from recoup.solvers.program import Floats
from recoup.task import Finding, Task
from recoup.units import format_bytes

STARTS = ("checkpoint-all", "linearized-sqrt", "ap-greedy", "linearized-greedy", "recompute-forward", "griewank")
CLASS = "no schedule that runs each op at most once per stage fits"


def plan(task: Task) -> Finding:
    """Problem (9)."""
    impossible = below_floor(task)
    if impossible is not None:
        return impossible
    registry.offer_candidates(task, *STARTS)
    return _solve(task, partitioned=True)


def plan_unpartitioned(task: Task) -> Finding:
    """Problem (1) with memory: n free stages, in which the solver also finds the order of first runs."""
    impossible = below_floor(task, ordered=False)
    return impossible or _solve(task, partitioned=False)


def below_floor(task: Task, ordered: bool = True) -> Finding | None:
    """Infeasible at a glance: one op needs more than the budget."""
    floor = memory_floor(task.graph, ordered)
    if task.budget is None or floor.bytes <= task.budget:
        return None
    needs = format_bytes(floor.bytes)
    message = f"op {floor.op!r} needs {needs} while it runs" if floor.op else f"{needs} are resident"
    return Finding(infeasible=True, message=message)


def _solve(task: Task, partitioned: bool) -> Finding:
    solver = solvers.get(task.solver)
    finding: Finding | None = None  # what the first round proves; later ones have less memory
    budget = task.budget
    while True:
        stage = StageProgram(task.graph, budget, partitioned, task.clock.stopped)
        if task.clock.stopped():
            return finding or Finding()
        if task.cost_limit is not None:
            stage.limit_cost(task.cost_limit)

        def found(x: Floats, stage: StageProgram = stage) -> None:
            task.offer(stage.schedule(x))

        def progress(bound: float, incumbent: float, stage: StageProgram = stage) -> None:
            task.report(proven(task, stage, bound))

        answer = solver.solve(
            stage.program,
            time_limit=task.clock.left(),
            gap=task.gap,
            seed=task.seed,
            start=None if task.best is None else stage.point(task.best),
            stopped=task.clock.stopped,
            progress=progress,
            found=found,
        )
        if finding is None:
            bound = proven(task, stage, answer.bound)
            failed = answer.status == "infeasible"
            finding = Finding(
                None if bound is None else whole(task, bound),
                infeasible=failed,
                scope="stage-once",
                message=CLASS if failed else "",
            )
        if answer.x is None or budget is None:
            return finding
        judged = task.offer(stage.schedule(answer.x))
        if judged.peak_bytes <= (task.budget or 0):
            return finding
        budget -= judged.peak_bytes - (task.budget or 0)  # the solver's tolerance; round against ourselves


def proven(task: Task, stage: StageProgram, bound: float) -> float | None:
    """A solver's bound in the graph's time unit, a hair lower for its tolerances."""
    if not math.isfinite(bound):
        return None
    return bound * stage.time_unit * (1 - 1e-9)


def whole(task: Task, bound: float) -> float:
    """Where all times are multiples of a whole number so is every cost: round a proven bound up to the next."""
    unit = reduce(math.gcd, (int(time) for time in task.graph.arrays.times), 0) if task.graph.arrays.integral else 0
    return math.ceil(bound / unit - 1e-6) * unit if unit else bound
