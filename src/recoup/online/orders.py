"""A schedule as orders to a live program's runtime: what to run again and what to evict before each operator."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

import numpy as np

from recoup.judge import simulate
from recoup.schedule import Schedule
from recoup.views.algorithm1 import Compute, statements


@dataclass(frozen=True, slots=True)
class Order:
    """Bring back what one operator makes, or evict one value."""

    values: tuple[int, ...]
    evict: bool


def memory_with_copies(schedule: Schedule, copies: bool) -> list[int]:
    """What is in memory while each operator runs. With ``copies`` all that is made again is there twice for a moment:
    the new bytes, and their place."""
    graph = schedule.graph
    sizes = {value.id: value.bytes for value in graph.values}
    memory: list[int] = simulate(graph, schedule).memory.tolist()
    ran: set[int] = set()
    for step, op in enumerate(schedule.ops.tolist()):
        if copies and op in ran:
            memory[step] += sum(sizes[value] for value in graph.ops[op].outputs)
        ran.add(op)
    return memory


def orders(schedule: Schedule, count: int, ends: Mapping[int, int], holds: Container[int] = ()) -> list[list[Order]]:
    """For each of the step's ``count`` operators what to do before it runs; ops and values are called by numbers.

    ``ends`` says before which operator the program itself lets go of a value: nobody needs to be told to then, unless
    somebody ``holds`` it.
    Raises :class:`ValueError` if the schedule runs operators first in another order than the program.
    """
    graph = schedule.graph
    before: list[list[Order]] = [[] for _ in range(count)]
    registers: dict[int, int] = {}
    ran: set[int] = set()
    again: set[int] = set()
    waiting: list[Order] = []
    for line in statements(schedule):
        if not isinstance(line, Compute):
            value = registers[line.register]
            if str(value) not in graph.outputs:
                waiting.append(Order((value,), evict=True))
            continue
        position = int(line.op)
        made = tuple(map(int, graph.ops[graph.op_index[line.op]].outputs))
        registers.update(zip(line.registers, made, strict=True))
        if position in ran:
            again.update(made)
            waiting.append(Order(made, evict=False))
            continue
        if ran and position < max(ran):
            raise ValueError(f"operator {position} would run after operator {max(ran)}")
        ran.add(position)
        for order in waiting:
            value = order.values[0]
            let_go = ends.get(value, count) <= position and value not in again and value not in holds
            if not (order.evict and let_go):
                before[position].append(order)
        waiting = []
    return before


def outliving(schedule: Schedule, ends: Mapping[int, int]) -> dict[int, int]:
    """The values that something is made from again after the program has let go of them, each with the operator before
    which that happens for the last time: if nobody holds them, they must be made again, too."""
    graph = schedule.graph
    ran: set[int] = set()
    again: set[int] = set()
    read: set[int] = set()  # by what is made again before the next operator
    found: dict[int, int] = {}
    for op in schedule.ops.tolist():
        one = graph.ops[op]
        if op in ran:
            read.update(set(map(int, one.inputs)) - again)
            again.update(map(int, one.outputs))
            continue
        ran.add(op)
        position = int(one.id)
        found.update((value, position) for value in read if ends.get(value, position + 1) <= position)
        read.clear()
    return found


def worthwhile(
    before: list[list[Order]], schedule: Schedule, ends: Mapping[int, int], room: int, copies: bool
) -> list[list[Order]]:
    """The orders without evictions for which there is room enough: of what is small, or came with something else, or
    would never be read again. Each of them takes time, and so does knowing what is needed to obey it."""
    graph = schedule.graph
    sizes = {int(value.id): value.bytes for value in graph.values}
    memory = np.full(len(before), graph.resident_bytes)
    first = {op: step for step, op in reversed(list(enumerate(schedule.ops.tolist())))}
    position = len(before) - 1  # of the operator before which something is repeated
    for step, bytes_ in reversed(list(enumerate(memory_with_copies(schedule, copies)))):
        op = int(schedule.ops[step])
        position = int(graph.ops[op].id) if first[op] == step else position
        memory[position] = max(memory[position], bytes_)
    returns: dict[int, list[int]] = {}
    for at, orders_ in enumerate(before):
        for order in orders_:
            for value in order.values if not order.evict else ():
                returns.setdefault(value, []).append(at)
    evictions = [(order.values[0], at) for at, orders_ in enumerate(before) for order in orders_ if order.evict]
    dropped = set()
    for value, at in sorted(evictions, key=lambda one: sizes[one[0]]):
        back = min((again for again in returns.get(value, ()) if again > at), default=len(before))
        end = ends.get(value, len(before))
        if end <= at:  # it came back for others' sake, and nobody lets go of it
            end = len(before)
        stays = memory[at : min(back + 1, end)]
        if stays.max() + sizes[value] <= room:
            stays += sizes[value]
            dropped.add((value, at))
    return [
        [order for order in orders_ if not (order.evict and (order.values[0], at) in dropped)]
        for at, orders_ in enumerate(before)
    ]
