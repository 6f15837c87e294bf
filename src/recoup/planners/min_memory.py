"""Min-memory: the smallest peak any of our planners can reach, and a lower bound on it.

Candidates are the baselines in all their settings. On small graphs the integer program (9) then minimises its own peak.
The bound is the floor: what a single op needs.
"""

from __future__ import annotations

from recoup import solvers
from recoup.judge import simulate
from recoup.planners import registry
from recoup.planners.checkmate import below_floor
from recoup.planners.floor import memory_floor
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


def plan(task: Task) -> Finding:
    """Offer everything; the task keeps the smallest peak, and the cheapest schedule with it."""
    task.smallest = True
    floor = memory_floor(task.graph).bytes
    registry.offer_candidates(task, *BASELINES)
    if len(task.graph.ops) <= SMALL and (task.least_peak or 0) > floor and not task.clock.stopped():
        _integer_program(task)
    if task.budget is not None and floor > task.budget:
        return below_floor(task) or Finding()
    reached = task.least_peak or 0
    if reached == floor:
        return Finding(message=f"{format_bytes(floor)} is the smallest peak of any schedule")
    return Finding(message=f"no schedule goes below {format_bytes(floor)}")


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
