"""The schedule: the order in which ops run, repeats allowed. Nothing else; every free follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recoup.arrays import Ints
from recoup.errors import ScheduleError
from recoup.graph import Graph

Step = str | tuple[str, str]  # an op id, or an op id with the name of the implementation to use


@dataclass(frozen=True, eq=False)
class Schedule:
    """A sequence of kernels (an op with one of its implementations), by number, for one graph.

    Users write schedules as op ids (:meth:`of`, :meth:`steps`); planners write op numbers (:meth:`of_ops`).
    """

    graph: Graph
    kernels: Ints

    def __post_init__(self) -> None:
        self.kernels.flags.writeable = False

    @staticmethod
    def of(graph: Graph, steps: Iterable[Any]) -> Schedule:
        """From op ids, or ``(op, implementation)`` pairs where it is not the first."""
        return Schedule(graph, np.array([_kernel(graph, step) for step in steps], dtype=np.int64))

    @staticmethod
    def of_ops(graph: Graph, ops: Sequence[int] | Ints) -> Schedule:
        """From op numbers, each with its first implementation."""
        return Schedule(graph, graph.arrays.first_kernel[np.asarray(ops, dtype=np.int64)])

    @staticmethod
    def default(graph: Graph) -> Schedule:
        """Each op once in the listed order, first implementations, optional ops left out: nothing recomputed."""
        return Schedule.of_ops(graph, np.flatnonzero(graph.arrays.mandatory))

    @property
    def ops(self) -> Ints:
        """The op number of each step."""
        return self.graph.arrays.op[self.kernels]

    def steps(self) -> list[Step]:
        """Op ids in order; a pair with the implementation's name where it is not the op's first."""
        first = self.graph.arrays.first_kernel
        steps: list[Step] = []
        for kernel, op in zip(self.kernels.tolist(), self.ops.tolist(), strict=True):
            choice = kernel - int(first[op])
            node = self.graph.ops[op]
            steps.append((node.id, node.implementations[choice].name) if choice else node.id)
        return steps

    def __len__(self) -> int:
        return len(self.kernels)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self.graph == other.graph and np.array_equal(self.kernels, other.kernels)

    def __hash__(self) -> int:
        return hash((self.graph, self.kernels.tobytes()))

    def __repr__(self) -> str:
        return f"Schedule({len(self)} steps of {self.graph!r})"


def _kernel(graph: Graph, step: Any) -> int:
    name, choice = step if isinstance(step, list | tuple) and len(step) == 2 else (step, None)
    if not isinstance(name, str) or not (choice is None or isinstance(choice, str)):
        raise ScheduleError(f"a step is an op id or [op, implementation], not {step!r}")
    if name not in graph.op_index:
        raise ScheduleError(f"the graph has no op {name!r}")
    index = graph.op_index[name]
    first = int(graph.arrays.first_kernel[index])
    if choice is None:
        return first
    for offset, impl in enumerate(graph.ops[index].implementations):
        if impl.name == choice:
            return first + offset
    raise ScheduleError(f"op {name!r} has no implementation {choice!r}")
