"""The plan: what is saved, shared and executed. A graph, its schedule, the prediction, and where it was profiled."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recoup.errors import GraphError, PlanError, RecoupError, ScheduleError
from recoup.files import read_bytes, write_text
from recoup.graph import Graph
from recoup.graph_json import Fields, from_data, parse_json, to_data
from recoup.judge import simulate
from recoup.schedule import Schedule
from recoup.solution import Solution

FORMAT, VERSION = "recoup-plan", 1


@dataclass(frozen=True)
class Plan:
    """A schedule that the judge has passed, with its graph and what it promises."""

    graph: Graph
    schedule: Schedule
    cost: float
    peak_bytes: int
    budget_bytes: int | None = None
    method: str = ""
    status: str = "feasible"
    scope: str = "any"
    lower_bound: float | None = None
    profiled_on: str | None = None

    @staticmethod
    def of(solution: Solution) -> Plan:
        """The plan of a solution that has a schedule."""
        if solution.schedule is None or solution.cost is None or solution.peak_bytes is None:
            raise PlanError(f"there is no schedule to save: {solution.status}")
        return Plan(
            graph=solution.graph,
            schedule=solution.schedule,
            cost=solution.cost,
            peak_bytes=solution.peak_bytes,
            budget_bytes=solution.budget_bytes,
            method=solution.method,
            status=solution.status,
            scope=solution.scope,
            lower_bound=solution.lower_bound,
        )

    def to_json(self) -> str:
        """The plan as JSON; the same plan always gives the same bytes."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.graph.fingerprint,
            "method": self.method,
            "status": self.status,
            "scope": self.scope,
            "budget_bytes": self.budget_bytes,
            "cost": self.cost,
            "peak_bytes": self.peak_bytes,
            "lower_bound": self.lower_bound,
            "profiled_on": self.profiled_on,
            "schedule": self.schedule.steps(),
            "graph": to_data(self.graph),
        }
        return json.dumps(data, separators=(",", ":"), allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, all of it or nothing."""
        write_text(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan; it is judged again, and refused if its numbers are not those it promises."""
        return Plan.from_json(read_bytes(path, PlanError))

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """Read a plan from its JSON."""
        return _from_data(parse_json(text, PlanError))


def _from_data(data: Any) -> Plan:
    fields = Fields(data, "the plan", PlanError)
    if fields.take("format") != FORMAT:
        raise PlanError(f"format is {data['format']!r}; this is not a {FORMAT} file")
    version = fields.take("version")
    if version != VERSION or isinstance(version, bool):
        raise PlanError(f"version {version!r} is not supported; this recoup reads version {VERSION}")
    promised = {key: fields.string(key) for key in ("method", "status", "scope")}
    numbers = {key: fields.number(key) for key in ("cost", "peak_bytes", "budget_bytes", "lower_bound")}
    fingerprint, steps, profiled_on = fields.string("fingerprint"), fields.list("schedule"), fields.take("profiled_on")
    if profiled_on is not None and not isinstance(profiled_on, str):
        raise PlanError("the plan: profiled_on must be a string or null")
    graph_data = fields.take("graph")
    fields.done()
    try:
        graph = from_data(graph_data)
        if graph.fingerprint != fingerprint:
            raise PlanError("the graph in the plan is not the one it was made for: the fingerprints differ")
        schedule = Schedule.of(graph, steps)
        judged = simulate(graph, schedule)
    except (GraphError, ScheduleError) as problem:
        raise PlanError(f"the plan is broken: {problem}") from problem
    for key, found in (("cost", judged.cost), ("peak_bytes", judged.peak_bytes)):
        if numbers[key] != found:
            raise PlanError(f"the plan promises {key} {numbers[key]!r}, but its schedule has {found!r}")
    budget = numbers["budget_bytes"]
    if budget is not None and judged.peak_bytes > budget:
        raise PlanError(f"the plan needs {judged.peak_bytes} bytes, over its budget of {budget}")
    return Plan(
        graph=graph,
        schedule=schedule,
        cost=judged.cost,
        peak_bytes=judged.peak_bytes,
        budget_bytes=None if budget is None else int(budget),
        lower_bound=numbers["lower_bound"],
        profiled_on=profiled_on,
        **promised,
    )


def load_graph_or_plan(path: str | Path) -> Graph | Plan:
    """Whichever of the two the file holds."""
    data = parse_json(read_bytes(path, RecoupError), RecoupError)
    return _from_data(data) if data.get("format") == FORMAT else from_data(data)
