"""The judge: the only code that decides whether a schedule is valid, what it costs and where it peaks.

The rules, from the design:

- An op may run when all its inputs are live. While it runs, memory is resident + live values + its outputs + its
  workspace; nothing it reads is freed before it returns.
- A value instance is freed right after its last use before its next recomputation. A required output stays from its
  first run to the end; a double made by a rerun counts while that op runs.
- Every op that is not optional runs; an op marked ``once`` runs exactly once.
- An in-place kernel adds no bytes for the output it writes over an input, and that input is gone afterwards.

All of it is lifetime analysis: sort every read and write by value and step; each write opens an instance, which
lasts until the last read before the next write. It is done with arrays because planners call it in their loops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from recoup.arrays import Arrays, Bools, Ints
from recoup.errors import ScheduleError
from recoup.graph import Graph
from recoup.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Simulation:
    """What the judge found: ``memory[k]`` is the number of bytes in use while step ``k`` runs."""

    schedule: Schedule
    cost: float
    peak_bytes: int
    memory: Ints
    instances: Instances

    @property
    def peak_step(self) -> int:
        """The first step at which memory is at its peak."""
        return int(np.argmax(self.memory)) if len(self.memory) else 0

    def live(self, step: int) -> tuple[str, ...]:
        """Ids of the values in memory while ``step`` runs: what it reads, writes, and what waits for later."""
        if not 0 <= step < len(self.memory):
            raise ScheduleError(f"there is no step {step}: the schedule has {len(self.memory)}")
        alive = (self.instances.first <= step) & (step <= self.instances.last)
        values = self.schedule.graph.values
        return tuple(values[v].id for v in np.unique(self.instances.value[alive]).tolist())


@dataclass(frozen=True, eq=False)
class Instances:
    """Lifetimes: instance ``k`` of ``value[k]`` is made at step ``first[k]`` and last needed at ``last[k]``."""

    value: Ints
    first: Ints
    last: Ints


def simulate(graph: Graph, schedule: Schedule | Sequence[Any]) -> Simulation:
    """Judge a schedule: raises :class:`ScheduleError` unless it is valid, else says cost, peak and memory.

    >>> from recoup.generators import chain
    >>> graph = chain(1)
    >>> simulate(graph, ["f1", "loss", "b1"]).peak_bytes
    3
    """
    if not isinstance(schedule, Schedule):
        schedule = Schedule.of(graph, schedule)
    elif schedule.graph is not graph and schedule.graph != graph:
        raise ScheduleError("the schedule was made for another graph")
    a, kernels = graph.arrays, schedule.kernels
    _check_counts(graph, schedule)
    instances = lifetimes(graph, kernels)
    memory = memory_curve(graph, kernels, instances)
    memory.flags.writeable = False
    peak = int(memory.max()) if len(memory) else graph.resident_bytes
    return Simulation(schedule, _cost(a, kernels), peak, memory, instances)


def cost_of(graph: Graph, schedule: Schedule) -> float:
    """The sum of the times, exact for integers and correctly rounded for floats, whatever the order."""
    return _cost(graph.arrays, schedule.kernels)


def _cost(a: Arrays, kernels: Ints) -> float:
    runs: list[int] = np.bincount(kernels, minlength=len(a.times)).tolist()
    if a.integral:
        return sum(count * time for count, time in zip(runs, a.times, strict=True))
    return math.fsum(a.times[k] for k in kernels.tolist())


def _check_counts(graph: Graph, schedule: Schedule) -> None:
    a = graph.arrays
    runs = np.bincount(schedule.ops, minlength=len(graph.ops))
    never = np.flatnonzero((runs == 0) & a.mandatory)
    if len(never):
        raise ScheduleError(f"op {graph.ops[never[0]].id!r} never runs")
    often = np.flatnonzero((runs > 1) & a.once)
    if len(often):
        raise ScheduleError(f"op {graph.ops[often[0]].id!r} may run only once but runs {runs[often[0]]} times")


def lifetimes(graph: Graph, kernels: Ints) -> Instances:
    """Every value instance of a sequence of kernels; raises :class:`ScheduleError` if one reads what is not there."""
    a, steps = graph.arrays, len(kernels)
    read_value, read_step = a.inputs.gather(kernels)
    made_value, made_step = a.outputs.gather(kernels)
    value = np.concatenate([read_value, made_value])
    step = np.concatenate([read_step, made_step])
    order = np.argsort(value * (steps + 1) + step, kind="stable")
    is_write = order >= len(read_value)
    value, step = value[order], step[order]

    new_value = np.ones(len(value), dtype=np.bool_)
    new_value[1:] = value[1:] != value[:-1]
    gone = np.zeros(len(value), dtype=np.bool_)  # right after an in-place kernel overwrote the value
    gone[1:] = ~new_value[1:] & ~is_write[:-1] & (a.overwritten[kernels[step[:-1]]] == value[:-1])
    bad = np.flatnonzero((new_value | gone) & ~is_write)
    if len(bad):
        _refuse(graph, kernels, value[bad], step[bad], gone[bad])

    writes = np.flatnonzero(is_write)
    first = step[writes]
    last = step[np.append(writes, len(value))[1:] - 1]
    held = a.required[value[writes]]
    last = np.where(held, np.where(new_value[writes], steps - 1, first), last)
    if np.count_nonzero(held & new_value[writes]) != np.count_nonzero(a.required):
        missing = np.setdiff1d(np.flatnonzero(a.required), value[writes])
        raise ScheduleError(f"the required output {graph.values[missing[0]].id!r} is never made")
    return Instances(value[writes], first, last)


def _refuse(graph: Graph, kernels: Ints, value: Ints, step: Ints, gone: Bools) -> NoReturn:
    """Name the first step that cannot run."""
    worst = int(np.argmin(step))
    op = graph.ops[graph.arrays.op[kernels[step[worst]]]].id
    name = graph.values[value[worst]].id
    maker = graph.ops[graph.arrays.producer[value[worst]]].id
    why = "has been overwritten in place" if gone[worst] else "has not been made"
    raise ScheduleError(
        f"step {step[worst]} runs op {op!r}, which reads {name!r}, but {name!r} {why}: run op {maker!r} before it"
    )


def memory_curve(graph: Graph, kernels: Ints, instances: Instances) -> Ints:
    """Bytes in use while each step runs."""
    a, steps = graph.arrays, len(kernels)
    inplace = a.overwriting[kernels[instances.first]] == instances.value
    begins = instances.first + inplace  # until the kernel returns, the bytes are those of the input
    counted = begins <= instances.last
    size = a.bytes[instances.value[counted]]
    change = np.zeros(steps + 1, dtype=np.int64)
    np.add.at(change, begins[counted], size)
    np.subtract.at(change, instances.last[counted] + 1, size)
    return np.cumsum(change[:steps]) + a.workspace[kernels] + graph.resident_bytes
