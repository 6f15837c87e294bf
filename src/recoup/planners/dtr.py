"""DTR as a planner: run the online simulator over the graph and take what it ran as the schedule.

It sees one op at a time, evicts when memory runs short and brings back what is read. The judge frees values earlier
than DTR evicts them, so that a schedule may need less than the budget it was found with; budgets above the one asked
for are therefore worth a try, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from recoup.graph import Graph
from recoup.judge import simulate
from recoup.online import heuristics
from recoup.online.simulator import OutOfMemory, Simulator, Thrashing
from recoup.schedule import Schedule
from recoup.task import Finding, NotApplicableError, Task

TRIED = ("dtr", "dtr-eq", "dtr-local", "e-star", "msps", "lru")
ROOM = (1.0, 0.95, 1.05, 0.9, 1.1, 1.2, 0.8)  # of the budget: what the simulator is given
LIMIT = 10.0  # times the base cost; worse schedules are of no use
STARTS = ("msps", "e-star", "dtr")  # what search begins from: on the built-in networks these repair to the cheapest


def plan(task: Task) -> Finding:
    """Every heuristic at the budget and around it, until the clock stops."""
    graph = task.graph
    plain = Schedule.default(graph)
    budget = simulate(graph, plain).peak_bytes if task.budget is None else task.budget
    for share in ROOM:
        for name in TRIED:
            schedule = trace(graph, int(share * budget), name)
            if schedule is not None:
                task.offer(schedule)
            if task.clock.stopped():
                return Finding()
    return Finding()


def starts(graph: Graph, budget: int, limit: float = 2.0) -> Iterator[Schedule]:
    """A few schedules for another planner to begin from, in the budget and within ``limit`` times the base cost.

    They say what to keep from all that came before; what they run again needlessly is for that planner to find.
    """
    for name in STARTS:
        try:
            schedule = trace(graph, budget, name, limit)
        except NotApplicableError:
            return
        if schedule is not None:
            yield schedule


def trace(graph: Graph, budget: int, heuristic: str, limit: float = LIMIT) -> Schedule | None:
    """The ops that DTR runs within ``budget`` bytes, or None if it cannot within ``limit`` times the base cost."""
    if any(op.implementations[0].inplace for op in graph.ops):
        raise NotApplicableError("an op writes over its input, which DTR could not bring back")
    run = Simulator(budget - graph.resident_bytes, heuristics.make(heuristic), "eager", limit)
    sizes = {value.id: value.bytes for value in graph.values}
    order = [op for op in graph.ops if not op.optional]
    last = {value: op.id for op in order for value in op.inputs}
    held = set(graph.outputs)
    tensors: dict[str, int] = {}
    try:
        for op in order:
            made = run.call(
                [tensors[value] for value in op.inputs if value in tensors],
                [sizes[value] for value in op.outputs],
                op.time,
                workspace=op.workspace,
            )
            tensors |= zip(op.outputs, made, strict=True)
            for value in op.outputs:
                if op.once or value in held:
                    run.keep(tensors[value])
            for value in dict.fromkeys((*op.inputs, *op.outputs)):
                if value in tensors and last.get(value, op.id) == op.id and value not in held:
                    run.release(tensors[value])
    except (OutOfMemory, Thrashing):
        return None
    numbers = [graph.op_index[op.id] for op in order]
    return Schedule.of_ops(graph, [numbers[op] for op in run.ran])
