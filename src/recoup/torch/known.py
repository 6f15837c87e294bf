"""What was planned before: under which name it is kept, and whether it still fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recoup.errors import BudgetError, PlanError, ScheduleError
from recoup.graph import Graph
from recoup.judge import simulate
from recoup.planfile import Plan
from recoup.schedule import Schedule
from recoup.torch.difference import difference
from recoup.units import format_bytes


def known_by(graph: Graph) -> str:
    """What is learned about a graph is kept under its fingerprint without workspaces: cuDNN may need others next time.

    Whether a schedule fits with those of now is for the judge to say.
    """
    without = [tuple(replace(one, workspace=0) for one in op.implementations) for op in graph.ops]
    ops = [replace(op, implementations=kinds, meta=None) for op, kinds in zip(graph.ops, without, strict=True)]
    return replace(graph, ops=tuple(ops)).fingerprint


def stored(steps: list[Any] | None, graph: Graph, limit: int) -> Plan | None:
    """A schedule from the store, if the judge still passes it."""
    if steps is None:
        return None
    try:
        schedule = Schedule.of(graph, steps)
        judged = simulate(graph, schedule)
    except ScheduleError:
        return None
    if judged.peak_bytes > limit:
        return None
    return Plan(graph, schedule, judged.cost, judged.peak_bytes, limit, method="stored")


def checked(plan: Plan, graph: Graph, here: str) -> Plan:
    """The user's plan, on the graph that was captured; an error that names the difference if it does not belong."""
    found = difference(plan, graph, here)
    if found:
        raise PlanError(f"the plan does not fit this step: {found}")
    schedule = Schedule.of(graph, plan.schedule.steps())
    judged = simulate(graph, schedule)
    if plan.budget_bytes is not None and judged.peak_bytes > plan.budget_bytes:
        limit = format_bytes(plan.budget_bytes)
        over = f"its peak would be {format_bytes(judged.peak_bytes)}, over its budget of {limit}"
        grown = graph.resident_bytes - plan.graph.resident_bytes
        if judged.peak_bytes - grown > plan.budget_bytes:
            raise BudgetError(f"operators work in more memory than when the plan was made, and {over}: make another")
        raise BudgetError(
            f"the plan was made with {format_bytes(plan.graph.resident_bytes)} resident; now there are "
            f"{format_bytes(graph.resident_bytes)}, and {over}: make a plan with reserve="
        )
    return replace(plan, graph=graph, schedule=schedule, cost=judged.cost, peak_bytes=judged.peak_bytes)
