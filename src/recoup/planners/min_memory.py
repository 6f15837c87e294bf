"""Min-memory: the smallest peak any of our planners can reach, and a lower bound on it.

First the plain schedule is repaired for the floor, what a single op needs, which nothing goes below. Where that is not
reached, candidates are the baselines in all their settings and, on small graphs, the integer program (9) with its own
peak as the objective.
"""

from __future__ import annotations

from recoup import solvers
from recoup.judge import simulate
from recoup.planners import registry
from recoup.planners.checkmate import below_floor
from recoup.planners.extras import Runs
from recoup.planners.floor import memory_floor
from recoup.planners.repair import Repairer
from recoup.planners.stages import StageProgram
from recoup.schedule import Schedule
from recoup.task import Finding, Task
from recoup.units import format_bytes

BASELINES = (
    "checkpoint-all",
    "linearized-sqrt",
    "recompute-forward",
    "griewank",
    "ap-greedy",
    "linearized-greedy",
    "checkpoint-last",
)
SMALL = 30  # ops up to which the integer program is worth its seconds here
REPAIRS = 6  # budgets for which the plain schedule is repaired, at most
CLOSE = 0.002  # of the peak: how near to what repair does not reach is near enough


def plan(task: Task) -> Finding:
    """Offer everything; the task keeps the smallest peak, and the cheapest schedule with it."""
    task.smallest = True
    floor = memory_floor(task.graph).bytes
    _repair(task, floor)
    if task.best is None or task.best.peak_bytes > floor:
        registry.offer_candidates(task, *BASELINES)
    if len(task.graph.ops) <= SMALL and (task.least_peak or 0) > floor and not task.clock.stopped():
        _integer_program(task)
    if task.budget is not None and floor > task.budget:
        return below_floor(task) or Finding()
    reached = task.least_peak or 0
    if reached == floor:
        return Finding(message=f"{format_bytes(floor)} is the smallest peak of any schedule")
    return Finding(message=f"no schedule goes below {format_bytes(floor)}")


def _repair(task: Task, floor: int) -> None:
    """For the floor, which is often reached, or else by halves for what lies between it and the best so far."""
    plain = task.offer(Schedule.default(task.graph))
    clock = task.clock.share(2)
    in_vain, budget = floor - 1, floor
    for _ in range(REPAIRS if len(plain.schedule) else 0):
        repairer = Repairer(task.graph, budget, task.seed, clock.stopped)
        fixed, before = repairer.repair(Runs.of(plain.schedule)), task.best
        if fixed is not None:
            task.offer(fixed.schedule())
            task.offer(repairer.prune(fixed).schedule())
        if task.best is before:  # there is none, or it is too dear
            in_vain = budget
        reached = plain.peak_bytes if task.best is None else task.best.peak_bytes
        if reached - in_vain <= CLOSE * reached or clock.stopped():
            return
        budget = (in_vain + reached) // 2


def _integer_program(task: Task) -> None:
    """Minimise the peak over the paper's class of schedules."""
    start = simulate(task.graph, Schedule.default(task.graph))
    stage = StageProgram(task.graph, start.peak_bytes, True)
    stage.minimise_peak()
    answer = solvers.get(task.solver).solve(
        stage.program,
        time_limit=task.clock.left(),
        seed=task.seed,
        stopped=task.clock.stopped,
    )
    if answer.x is not None:
        task.offer(stage.schedule(answer.x))
