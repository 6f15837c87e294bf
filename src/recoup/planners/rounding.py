"""Two-phase LP rounding (section 5, Algorithm 2), with the searches that section 5.3 and Appendix D ask for.

Solve the relaxation with an allowance: a share epsilon of the memory above the resident part stays unused. Round S,
deterministically at a threshold or at random with S* as probabilities, and find the cheapest R for it. Rounding does
not look at memory, so the judge looks at every schedule, and the search goes over epsilon and thresholds until the
cheapest that fits is found.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recoup import solvers
from recoup.graph import Graph
from recoup.planners.checkmate import CLASS, below_floor, proven
from recoup.planners.policy import cheapest_schedule
from recoup.planners.stages import StageProgram
from recoup.schedule import Schedule
from recoup.solvers.program import Floats
from recoup.task import Finding, Task

ALLOWANCES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
THRESHOLDS = (0.5, *np.linspace(0.025, 0.975, 39))
SAMPLES = 40


def plan(task: Task) -> Finding:
    """Best schedule within budget over all allowances, thresholds and samples; bound from the LP without allowance."""
    impossible = below_floor(task)
    if impossible is not None:
        return impossible
    solver = solvers.get(task.solver)
    rng = np.random.default_rng(task.seed)
    bound: float | None = None
    for epsilon in ALLOWANCES if task.budget is not None else ALLOWANCES[:1]:
        stage = StageProgram(task.graph, _leave(task, epsilon), True, task.clock.stopped)
        answer = solver.solve(
            stage.program, relax=True, time_limit=task.clock.left(), seed=task.seed, stopped=task.clock.stopped
        )
        if answer.x is None:
            if answer.status == "infeasible" and epsilon == 0.0:
                return Finding(infeasible=True, scope="stage-once", message=CLASS)
            break
        cost = proven(task, stage, answer.bound)
        if bound is None:
            bound = cost
            task.report(bound)
        if task.best is not None and cost is not None and cost >= task.best.cost:
            break  # with less memory it only gets dearer
        task.offer_all(_roundings(task.graph, stage.carried(answer.x), rng))
    return Finding(bound, scope="stage-once")


def _leave(task: Task, epsilon: float) -> int | None:
    if task.budget is None:
        return None
    resident = task.graph.resident_bytes
    return resident + int((task.budget - resident) * (1.0 - epsilon))


def _roundings(graph: Graph, S: Floats, rng: np.random.Generator) -> Iterator[Schedule]:
    """Deterministic roundings, then random ones, each different S once."""
    seen: set[bytes] = set()
    thresholds = [np.full_like(S, p) for p in THRESHOLDS]
    for threshold in (*thresholds, *(rng.random(S.shape) for _ in range(SAMPLES))):
        rounded = threshold < S
        if (key := rounded.tobytes()) in seen:
            continue
        seen.add(key)
        yield cheapest_schedule(graph, rounded)
