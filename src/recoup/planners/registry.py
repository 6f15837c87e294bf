"""Every planner, by name. A planner is a file with a ``plan(task)``; it joins by a line here and loads when asked for.

Heuristics give ``candidates(graph)`` instead: the schedules of all their settings. What is common to them, taking the
cheapest that fits, is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from recoup.errors import MethodError
from recoup.graph import Graph
from recoup.schedule import Schedule
from recoup.task import Finding, NotApplicableError, Task


@dataclass(frozen=True)
class Method:
    """A planner's name, what it is, where the paper has it, and the function that does it."""

    name: str
    title: str
    paper: str
    target: str  # "module:function"
    family: bool = False  # a heuristic: the function yields the schedules of all its settings
    proves: bool = False  # gives a bound of its own, and so may say "infeasible"
    gap: float = 0.0  # how close to optimal is close enough, unless the user says

    def candidates(self, graph: Graph) -> Iterator[Schedule]:
        """All schedules of a heuristic; raises NotApplicableError where it does not apply."""
        if not self.family:
            raise MethodError(f"{self.name} is not a heuristic")
        found: Iterator[Schedule] = self._function()(graph)
        return found

    def plan(self, task: Task) -> Finding:
        """Search; what is found is in the task."""
        try:
            if not self.family:
                finding: Finding = self._function()(task)
                return finding
            task.offer_all(self.candidates(task.graph))
        except NotApplicableError as problem:
            return Finding(message=f"{self.name} does not apply: {problem}")
        return Finding()

    def _function(self) -> Any:
        module, function = self.target.split(":")
        return getattr(import_module(f"recoup.planners.{module}"), function)


def _heuristic(name: str, title: str, paper: str, target: str) -> Method:
    return Method(name, title, paper, target, family=True)


def _prover(name: str, title: str, paper: str, target: str, gap: float = 0.0) -> Method:
    return Method(name, title, paper, target, proves=True, gap=gap)


_ALL = (
    _prover("optimal", "cut-point relaxation: near-optimal and proven, in seconds", "", "optimal:plan", gap=0.005),
    _prover("checkmate", "integer program over frontier-advancing stages", "(9)", "checkmate:plan"),
    _prover(
        "checkmate-unpartitioned",
        "integer program over free stages; small graphs only",
        "(1) with memory",
        "checkmate:plan_unpartitioned",
    ),
    _prover("lp", "linear relaxation of checkmate: a bound, no schedule", "5.1", "lp:plan"),
    _prover("rounding", "two-phase rounding of the relaxation", "Alg. 2, App. D", "rounding:plan"),
    _heuristic("checkpoint-all", "keep everything", "Table 1", "checkpoint_all:candidates"),
    _heuristic("checkpoint-last", "keep only the newest result", "Table 1", "checkpoint_last:candidates"),
    _heuristic(
        "recompute-forward", "keep gradients, recompute the rest for every op", "", "recompute_forward:candidates"
    ),
    _heuristic("griewank", "REVOLVE on linear networks", "Table 1", "griewank:candidates"),
    _heuristic("chen-sqrt", "sqrt(n) segments on linear networks", "Table 1", "chen:sqrt"),
    _heuristic("chen-greedy", "segments of equal memory on linear networks", "Table 1", "chen:greedy"),
    _heuristic("ap-sqrt", "sqrt(n) segments over articulation points", "B.1", "articulation:sqrt"),
    _heuristic("ap-greedy", "segments of equal memory over articulation points", "B.1", "articulation:greedy"),
    _heuristic("linearized-sqrt", "sqrt(n) segments over the listed order", "B.2", "linearized:sqrt"),
    _heuristic("linearized-greedy", "segments of equal memory over the listed order", "B.2", "linearized:greedy"),
    Method("dtr", "decide online what to evict, with every DTR heuristic", "DTR", "dtr:plan"),
    Method("min-memory", "the smallest peak, whatever it costs", "", "min_memory:plan"),
)

METHODS: dict[str, Method] = {method.name: method for method in _ALL}


def get(name: str) -> Method:
    """The planner called ``name``; ``auto`` is the default one."""
    if name == "auto":
        return METHODS["optimal"]
    if name not in METHODS:
        raise MethodError(f"there is no method {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]


def offer_candidates(task: Task, *names: str) -> None:
    """Offer the schedules of several heuristics, each for its share of the time; some may not apply."""
    for position, name in enumerate(names):
        share = task.clock.share(len(names) - position)
        try:
            for schedule in METHODS[name].candidates(task.graph):
                task.offer(schedule)
                if share.stopped():
                    break
        except NotApplicableError:
            continue
        if task.clock.stopped():
            return
