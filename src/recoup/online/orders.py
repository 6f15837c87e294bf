"""A schedule as orders to a live program's runtime: what to run again and what to evict before each operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recoup.judge import simulate
from recoup.schedule import Schedule
from recoup.views.algorithm1 import Compute, statements


@dataclass(frozen=True, slots=True)
class Order:
    """Bring back what one operator makes, or evict one value."""

    values: tuple[int, ...]
    evict: bool


def peak_with_copies(schedule: Schedule) -> int:
    """The schedule's peak where all that is made again is there twice for a moment: the new bytes, and their place."""
    graph = schedule.graph
    sizes = {value.id: value.bytes for value in graph.values}
    memory = simulate(graph, schedule).memory.tolist()
    ran: set[int] = set()
    for step, op in enumerate(schedule.ops.tolist()):
        if op in ran:
            memory[step] += sum(sizes[value] for value in graph.ops[op].outputs)
        ran.add(op)
    return max(memory, default=graph.resident_bytes)


def orders(schedule: Schedule, count: int, ends: Mapping[int, int]) -> list[list[Order]]:
    """For each of the step's ``count`` operators what to do before it runs; ops and values are called by numbers.

    ``ends`` says before which operator the program itself lets go of a value: nobody needs to be told to then.
    Raises :class:`ValueError` if the schedule runs operators first in another order than the program.
    """
    graph = schedule.graph
    before: list[list[Order]] = [[] for _ in range(count)]
    holds: dict[int, int] = {}
    ran: set[int] = set()
    again: set[int] = set()
    waiting: list[Order] = []
    for line in statements(schedule):
        if not isinstance(line, Compute):
            value = holds[line.register]
            if str(value) not in graph.outputs:
                waiting.append(Order((value,), evict=True))
            continue
        position = int(line.op)
        made = tuple(map(int, graph.ops[graph.op_index[line.op]].outputs))
        holds.update(zip(line.registers, made, strict=True))
        if position in ran:
            again.update(made)
            waiting.append(Order(made, evict=False))
            continue
        if ran and position < max(ran):
            raise ValueError(f"operator {position} would run after operator {max(ran)}")
        ran.add(position)
        for order in waiting:
            let_go = ends.get(order.values[0], count) <= position and order.values[0] not in again
            if not (order.evict and let_go):
                before[position].append(order)
        waiting = []
    return before
