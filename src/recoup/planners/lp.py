"""The linear relaxation of problem (9) (section 5.1): no schedule, but a lower bound on every one in its class.

The ratio of the integer optimum to it is the integrality gap of Appendix A: 26 / 22 = 1.18 for the 8-layer chain at a
budget of 4, against 26 / 1.206 = 21.56 without frontier-advancing stages.
"""

from __future__ import annotations

from recoup import solvers
from recoup.planners.checkmate import CLASS, below_floor, proven
from recoup.planners.stages import StageProgram
from recoup.task import Finding, Task


def plan(task: Task) -> Finding:
    """The bound; the answer has no schedule."""
    impossible = below_floor(task)
    if impossible is not None:
        return impossible
    stage = StageProgram(task.graph, task.budget, True, task.clock.stopped)
    answer = solvers.get(task.solver).solve(
        stage.program, relax=True, time_limit=task.clock.left(), seed=task.seed, stopped=task.clock.stopped
    )
    if answer.status == "infeasible":
        return Finding(infeasible=True, scope="stage-once", message=CLASS)
    if answer.status == "unknown":
        return Finding(message="the relaxation was not solved in time")
    return Finding(proven(task, stage, answer.bound), scope="stage-once", message="a bound, not a schedule")
