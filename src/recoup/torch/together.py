"""What is made again goes next to the kernel of the backward that reads the same, so that a compiler makes one of both.

A plan makes a value again right before what needs it. In the backward of a linear layer that is the weight's gradient;
soon after, something reads what the value was made from, to go on from the input's gradient:

    gelu again, weight's gradient, input's gradient, gelu's backward

In the order *input's gradient, gelu again, gelu's backward, weight's gradient* the two in the middle are one kernel,
which reads once what both need. Some values live longer so: where the plan's peak stays what it is, that costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import replace

from recoup.errors import ScheduleError
from recoup.graph import Graph, Op
from recoup.judge import simulate
from recoup.planfile import Plan
from recoup.schedule import Schedule
from recoup.torch.fusion import LARGE
from recoup.torch.joint import ARRIVAL


def bring_together(plan: Plan, fused: Set[str], fixed: Set[str]) -> Plan:
    """The plan with the same steps in another order, and no higher peak.

    ``fused`` are the ops that a compiler generates kernels for, ``fixed`` those that keep their order: what draws
    random numbers, say.
    """
    graph = plan.graph
    ops = {op.id: op for op in graph.ops}
    large = {value.id for value in graph.values if value.bytes >= LARGE}
    steps = [str(step) for step in plan.schedule.steps()]
    first = {step: place for place, step in reversed(list(enumerate(steps)))}
    movable = fused - fixed
    for place in range(len(steps) - 1, first[ARRIVAL], -1):
        if first[steps[place]] < place and steps[place] in movable:
            moved = _moved(steps, place, ops, fused, fixed, large)
            if moved is not None and _peak(graph, moved) <= plan.peak_bytes:
                steps = moved
    schedule = Schedule.of(graph, steps)
    return replace(plan, schedule=schedule, peak_bytes=simulate(graph, schedule).peak_bytes)


def _moved(
    steps: list[str], place: int, ops: Mapping[str, Op], fused: Set[str], fixed: Set[str], large: Set[str]
) -> list[str] | None:
    """The steps with the one at ``place`` right before the next fused kernel that reads something large which it reads
    or makes, and with what needs it in between right after that kernel and those that follow.

    None if there is no library kernel in between, or if that kernel cannot do without what is in between.
    """
    again = ops[steps[place]]
    shared = large & {*again.inputs, *again.outputs}
    made = set(again.outputs)
    before: list[str] = []
    after: list[str] = []
    reader = place + 1
    while reader < len(steps) and (steps[reader] not in fused or shared.isdisjoint(ops[steps[reader]].inputs)):
        step = steps[reader]
        waits = not made.isdisjoint(ops[step].inputs)
        if step == again.id or (waits and step in fixed):
            return None
        (after if waits else before).append(step)
        made.update(ops[step].outputs if waits else ())
        reader += 1
    late = made.difference(again.outputs)
    end = reader
    while end < len(steps) and steps[end] in fused and late.isdisjoint(ops[steps[end]].inputs):
        end += 1
    if end == reader or fused >= {*before, *after}:
        return None
    return [*steps[:place], *before, *steps[place : place + 1], *steps[reader:end], *after, *steps[end:]]


def _peak(graph: Graph, steps: list[str]) -> float:
    """Infinite where something would be read that is overwritten or gone."""
    try:
        return simulate(graph, Schedule.of(graph, steps)).peak_bytes
    except ScheduleError:
        return math.inf
