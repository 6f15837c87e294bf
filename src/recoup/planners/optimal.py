"""The default planner: provably near-optimal schedules in seconds (method and proof: docs/optimal.md).

Solve the cut relaxation with few cuts, realise its solution as a schedule, and have the judge look at it. Within budget
it is optimal. Otherwise repair it, which gives an upper bound; write down memory at the moments where it was too much;
and solve again. The relaxation's bound holds for every schedule, so the gap is certified whenever the loop ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from recoup import solvers
from recoup.judge import Simulation
from recoup.planners import dtr, registry
from recoup.planners.checkmate import below_floor, whole
from recoup.planners.cuts import CutProgram
from recoup.planners.extras import Runs
from recoup.planners.floor import cost_floor
from recoup.planners.realise import realise
from recoup.planners.repair import Repairer
from recoup.schedule import Schedule
from recoup.solvers.program import Answer, Floats
from recoup.task import Finding, Task

FALLBACKS = ("linearized-sqrt", "ap-greedy", "linearized-greedy", "recompute-forward", "griewank")
ALWAYS = 3  # solves that are worth it on small graphs even when the gap is small enough already
SMALL = 500  # ops of a small graph
ONLINE = 3000  # ops of the largest graph for which DTR is simulated: a second at most
EXACT = 1e-6  # gap of the relaxation itself, unless the user wants none at all
PROVEN = 2e-9  # gap of what is optimal: bounds are a hair lower than the solver's, for its tolerances
WATCHED = 10  # ops whose reruns are added to the program at a time
EFFORT = 5_000_000  # steps judged by local search beside a solve: a second or two


def plan(task: Task) -> Finding:
    """Search until the gap is small enough, nothing is left to add, or time is up."""
    return below_floor(task) or Search(task).run()


class Search:
    """One search: the cuts so far, the bound, and, in the task, the best schedule."""

    def __init__(self, task: Task) -> None:
        self.task, self.graph = task, task.graph
        everything = 2 * int(self.graph.arrays.bytes.sum()) + int(self.graph.arrays.workspace.sum())
        self.room = everything if task.budget is None else task.budget - self.graph.resident_bytes
        budget = self.graph.resident_bytes + self.room
        self.repairer = Repairer(self.graph, budget, task.seed, self.settled)
        self.cuts: list[int] = []
        self.watched: list[int] = []
        self.closely: list[int] = []
        self.bound = cost_floor(self.graph)
        self.solves = 0

    def run(self) -> Finding:
        """Solve, realise, repair, tighten, and again."""
        plain = self.task.offer(Schedule.default(self.graph))
        if not len(plain.schedule) or self.done():
            return Finding(self.bound)
        self.cuts = [int(plain.schedule.ops[plain.peak_step])]
        self.start(plain)
        while not self.done():
            program = CutProgram(self.graph, self.room, sorted(self.cuts), sorted(self.watched), sorted(self.closely))
            answer = self.relax(program)
            if answer.status == "infeasible":
                return Finding(infeasible=True, message="the relaxation has no solution")
            if answer.x is None:
                break
            realised = self.offer_point(program, answer.x)
            if realised is None or self.done() or not self.tighten(realised):
                break
        if self.too_dear():
            return Finding(infeasible=True, message="every schedule that fits costs more than allowed")
        self.improve(3 * EFFORT)
        return Finding(self.bound)

    def done(self) -> bool:
        """Whether to stop: proven optimal, close enough after a few solves, too dear, or out of time."""
        if self.task.clock.stopped() or self.too_dear():
            return True
        quick = self.solves < ALWAYS and len(self.graph.ops) <= SMALL
        gap = 0.0 if quick else self.task.gap
        return self.task.best is not None and self.distance() <= max(gap, PROVEN)

    def settled(self) -> bool:
        """Whether no schedule can be better than the best, as far as the solver has told while it runs."""
        best, bound = self.task.best, self.task.bound
        proven = best is not None and bound is not None and bound >= best.cost * (1 - PROVEN)
        return proven or self.task.clock.stopped()

    def too_dear(self) -> bool:
        """Whether equation (10) is out of reach."""
        return self.task.cost_limit is not None and self.bound > self.task.cost_limit

    def distance(self) -> float:
        """The gap."""
        best = self.task.best
        return math.inf if best is None else (best.cost - self.bound) / max(best.cost, 1e-300)

    # Upper bounds ------------------------------------------------------------------------------------------------

    def start(self, plain: Simulation) -> None:
        """A first schedule: the plain one or the one given, repaired, or the cheapest baseline that fits; or DTR's."""
        self.offer_repaired(Runs.of(plain.schedule))
        if len(self.graph.arrays.times) > int(self.graph.arrays.mandatory.sum()):
            self.choose_after()
        if self.task.start is not None:
            self.task.offer(self.task.start)
            self.offer_repaired(Runs.of(self.task.start))
        if self.task.best is None:
            registry.offer_candidates(self.task, *FALLBACKS)
            if self.task.best is not None:
                self.offer_repaired(Runs.of(self.task.best.schedule))
        if len(self.graph.ops) <= (SMALL if self.task.best is not None else ONLINE) and not self.done():
            self.offer_online()

    def choose_after(self) -> None:
        """Plan with the first implementations, then choose: what choosing jointly is never worse than."""
        clock = self.task.clock.share(3)
        first = replace(self.task, graph=self.graph.without_choices(), clock=clock, best=None, bound=None, start=None)
        Search(first).run()
        if first.best is not None:
            schedule = Schedule.of(self.graph, first.best.schedule.steps())
            self.task.offer(schedule)
            self.task.offer(self.repairer.choose(Runs.of(schedule)).schedule())

    def offer_online(self) -> None:
        """What DTR would do, as it is and repaired: so much by work, not by the clock, so that it is repeatable.

        Not on larger graphs that have a schedule: there the search ends with the first that is close enough, so that
        a start which is just that would keep a better one from being found.
        """
        repairer = Repairer(self.graph, self.repairer.budget, self.task.seed, self.task.clock.stopped)
        for schedule in dtr.starts(self.graph, self.repairer.budget):
            self.task.offer(schedule)
            fixed = repairer.repair(Runs.of(schedule))
            if fixed is not None:
                self.task.offer(repairer.prune(fixed).schedule())
            if repairer.work > EFFORT // 5 or self.task.clock.stopped():
                return

    def offer_repaired(self, runs: Runs) -> None:
        """Repair a schedule and offer it, then without what it does not need."""
        fixed = self.repairer.repair(runs)
        if fixed is not None:
            self.task.offer(fixed.schedule())
            self.task.offer(self.repairer.prune(fixed).schedule())

    def offer_point(self, program: CutProgram, x: Floats) -> Simulation | None:
        """Realise a point of the relaxation and offer it, as it is and repaired."""
        schedule = realise(program, x)
        if schedule is None:
            return None
        judged = self.task.offer(schedule)
        if judged.peak_bytes > self.repairer.budget:
            self.offer_repaired(Runs.of(schedule))
        return judged

    def improve(self, effort: int = EFFORT) -> None:
        """Local search from the best schedule."""
        best = self.task.best
        if best is None or self.distance() <= PROVEN or self.task.clock.stopped():
            return
        better = self.repairer.improve(Runs.of(best.schedule), effort)
        self.task.offer(better.schedule())

    def improve_beside(self, running: Callable[[], bool]) -> None:
        """Local search while the solver runs: so much in any case, and more for as long as it takes.

        How much more depends on the machine, so that is offered only if time runs out: then nothing is repeatable.
        """
        self.improve()
        if self.task.best is None:
            return
        stopped = self.task.clock.stopped
        spare = Repairer(self.graph, self.repairer.budget, self.task.seed + 1, lambda: stopped() or not running())
        runs = spare.improve(Runs.of(self.task.best.schedule))
        if self.task.clock.stopped():
            self.task.offer(runs.schedule())

    # Lower bounds ------------------------------------------------------------------------------------------------

    def relax(self, program: CutProgram) -> Answer:
        """Solve the relaxation, with local search beside it once the first solve was not enough."""
        best, self.task.cuts = self.task.best, len(self.cuts)
        goal = math.inf if best is None else best.cost * (1 - self.task.gap)
        points: list[Floats] = []

        def progress(bound: float, incumbent: float) -> None:
            self.task.report(self.proven(program, bound))

        def stopped() -> bool:
            close = self.task.bound is not None and self.task.bound >= goal
            return self.task.clock.stopped() or (close and len(self.graph.ops) > SMALL)

        answer = solvers.get(self.task.solver).solve(
            program.program,
            time_limit=self.task.clock.left(),
            gap=min(EXACT, self.task.gap),
            seed=self.task.seed,
            start=None if best is None else program.point(best),
            stopped=stopped,
            progress=progress,
            found=points.append,
            beside=self.improve_beside if len(self.cuts) > 1 else None,
        )
        self.solves += 1
        bound = self.proven(program, answer.bound)
        if bound is not None:
            self.bound = max(self.bound, bound)
            self.task.report(self.bound)
        for x in points[-3:]:
            if answer.status != "infeasible" and not self.done():
                self.offer_point(program, x)
        return answer

    def proven(self, program: CutProgram, bound: float) -> float | None:
        """The solver's bound in the graph's time unit, a hair lower for its tolerances, then up to a whole cost."""
        return whole(self.task, bound * program.time_unit * (1 - 1e-9)) if math.isfinite(bound) else None

    def tighten(self, judged: Simulation) -> bool:
        """Add to the program what its solution got wrong; False if all of it is there already."""
        over = np.flatnonzero(judged.memory > self.repairer.budget)
        if not len(over):
            return False
        worst = over[np.argsort(-judged.memory[over], kind="stable")]
        ops = judged.schedule.ops
        first = np.zeros(len(ops), dtype=np.bool_)
        first[np.unique(ops, return_index=True)[1]] = True
        again = dict.fromkeys(ops[worst[~first[worst]]].tolist())
        repeated = [i for i in again if i in self.watched and i not in self.closely][:WATCHED]
        fresh = [i for i in again if i not in self.watched][:WATCHED]
        self.watched += fresh
        self.closely += repeated
        # the stage of a step is the first run that comes next
        steps = np.flatnonzero(first)
        stage = ops[steps[np.searchsorted(steps, worst)]].tolist()
        for t in (*stage, *(self.before(t) for t in stage)):
            if t is not None and t not in self.cuts and self.graph.arrays.mandatory[t]:
                self.cuts.append(int(t))
                return True
        return bool(fresh or repeated)

    def before(self, t: int) -> int | None:
        """The op that must run before ``t``, in the listed order."""
        earlier = np.flatnonzero(self.graph.arrays.mandatory[:t])
        return int(earlier[-1]) if len(earlier) else None
