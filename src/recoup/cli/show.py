"""``recoup show``."""

from __future__ import annotations

from collections import Counter

import click
import numpy as np

from recoup.arrays import Ints
from recoup.cli.common import number, percent, print_rows, read
from recoup.graph import Graph
from recoup.judge import Simulation, cost_of, simulate
from recoup.planfile import Plan
from recoup.planners.floor import memory_floor
from recoup.schedule import Schedule
from recoup.units import format_bytes


@click.command()
@click.argument("source", metavar="GRAPH|PLAN")
def show(source: str) -> None:
    """Say what is in a graph or a plan: sizes, costs, the memory over time, what is recomputed.

    GRAPH is a recoup-graph file or a built-in graph such as vgg16; PLAN is what 'recoup solve -o' wrote.
    """
    found = read(source)
    graph = found.graph if isinstance(found, Plan) else found
    plain = simulate(graph, Schedule.default(graph))
    print_rows(_graph_rows(graph, plain))
    if isinstance(found, Plan):
        click.echo()
        print_rows(_plan_rows(found, plain))


def _graph_rows(graph: Graph, plain: Simulation) -> list[tuple[str, str]]:
    phases = Counter(op.phase for op in graph.ops)
    largest = sorted(graph.values, key=lambda value: -value.bytes)[:3]
    floor = memory_floor(graph)
    choices = sum(len(op.implementations) > 1 for op in graph.ops)
    rows = [
        ("graph", f"{graph.name or '(no name)'}   fingerprint {graph.fingerprint[:12]}"),
        ("ops", f"{len(graph.ops)}   ({phases['forward']} forward, {phases['backward']} backward)"),
        ("values", f"{len(graph.values)}   largest: " + ", ".join(f"{v.id} {format_bytes(v.bytes)}" for v in largest)),
        ("cost", f"{number(plain.cost)} {graph.time_unit} with nothing recomputed"),
        ("resident", format_bytes(graph.resident_bytes)),
        ("peak", f"{format_bytes(plain.peak_bytes)} with nothing recomputed, at op {_op_at_peak(plain)!r}"),
        ("floor", f"{format_bytes(floor.bytes)}: no schedule needs less" + (f", op {floor.op!r}" if floor.op else "")),
        ("memory", _sparkline(plain.memory)),
    ]
    if choices:
        rows.insert(2, ("choices", f"{choices} ops have several implementations"))
    return rows


def _plan_rows(plan: Plan, plain: Simulation) -> list[tuple[str, str]]:
    judged = simulate(plan.graph, plan.schedule)
    budget = "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    overhead = judged.cost / plain.cost - 1 if plain.cost else 0.0
    runs = np.bincount(plan.schedule.ops, minlength=len(plan.graph.ops))
    again = Counter({op.name or op.id: 0 for op in plan.graph.ops})
    for op, count in zip(plan.graph.ops, runs.tolist(), strict=True):
        again[op.name or op.id] += max(0, count - 1)
    extra = cost_of(plan.graph, plan.schedule) - plain.cost
    common = ", ".join(f"{name} x{count}" for name, count in again.most_common(6) if count)
    return [
        (
            "plan",
            f"{plan.method or '(unknown method)'}, {plan.status}" + (f", scope {plan.scope}" if plan.scope else ""),
        ),
        ("budget", budget),
        ("peak", f"{format_bytes(judged.peak_bytes)}, at op {_op_at_peak(judged)!r}"),
        ("cost", f"{number(judged.cost)} {plan.graph.time_unit}   overhead {percent(overhead)} ({number(extra)})"),
        ("steps", f"{len(plan.schedule)}, of which repeats: {len(plan.schedule) - int((runs > 0).sum())}"),
        ("recomputed", common or "nothing"),
        ("memory", _sparkline(judged.memory)),
    ]


def _op_at_peak(judged: Simulation) -> str:
    if not len(judged.schedule):
        return ""
    return judged.schedule.graph.ops[int(judged.schedule.ops[judged.peak_step])].id


def _sparkline(memory: Ints, width: int = 72) -> str:
    """Memory over the steps, the peak of each slice of the schedule as a bar."""
    if not len(memory):
        return ""
    slices = np.array_split(memory, min(width, len(memory)))
    levels = np.array([part.max() for part in slices]) / max(1, int(memory.max()))
    return "".join(" ▁▂▃▄▅▆▇█"[round(level * 8)] for level in levels)
