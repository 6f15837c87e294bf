"""A graph as flat arrays: what the judge and the planners compute with.

A *kernel* is one implementation of one op; kernels are numbered op by op, so kernel ``first_kernel[i]`` is what op
``i`` runs when nobody chooses. Resident values appear nowhere: they are always there and already counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from recoup.graph import Graph

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Lists:
    """Lists of integers of varying length, end to end."""

    start: Ints  # list k is flat[start[k] : start[k + 1]]
    flat: Ints

    @staticmethod
    def of(lists: list[list[int]]) -> Lists:
        """Pack the lists."""
        start = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum([len(items) for items in lists], out=start[1:])
        return Lists(start, np.fromiter(chain.from_iterable(lists), dtype=np.int64))

    def __getitem__(self, k: int) -> Ints:
        return self.flat[self.start[k] : self.start[k + 1]]

    def gather(self, which: Ints) -> tuple[Ints, Ints]:
        """The lists numbered ``which`` end to end, and for each item its position in ``which``."""
        first = self.start[which]
        length = self.start[which + 1] - first
        owner = np.repeat(np.arange(len(which), dtype=np.int64), length)
        ends = np.cumsum(length)
        offset = np.arange(len(owner), dtype=np.int64) - np.repeat(ends - length, length)
        return self.flat[np.repeat(first, length) + offset], owner


@dataclass(frozen=True)
class Arrays:
    """See the module's docstring."""

    bytes: Ints  # per value
    required: Bools  # per value: made by an op and to be kept to the end
    producer: Ints  # per value: op index, -1 for inputs
    op: Ints  # per kernel: the op it implements
    first_kernel: Ints  # per op, and one past the end
    inputs: Lists  # per kernel: non-resident values read, each once
    outputs: Lists  # per kernel: values written
    workspace: Ints  # per kernel
    times: tuple[float, ...]  # per kernel, as the graph has them
    integral: bool  # all times are integers, so that sums are exact
    overwritten: Ints  # per kernel: the input that an in-place kernel overwrites, else -1
    overwriting: Ints  # per kernel: the output that takes its place, else -1
    mandatory: Bools  # per op: must run
    once: Bools  # per op: may run only once
    forward: Bools  # per op: phase

    @staticmethod
    def of(graph: Graph) -> Arrays:
        """Flatten a graph."""
        number = graph.value_index
        kernels = [(i, impl) for i, op in enumerate(graph.ops) for impl in op.implementations]
        counts = [len(op.implementations) for op in graph.ops]
        producer = np.full(len(graph.values), -1, dtype=np.int64)
        for name, op in graph.producer.items():
            producer[number[name]] = op
        required = np.zeros(len(graph.values), dtype=np.bool_)
        required[[number[v] for v in graph.outputs if v in graph.producer]] = True
        inputs = [[number[v] for v in dict.fromkeys(impl.inputs) if v in graph.producer] for _, impl in kernels]
        times = tuple(impl.time for _, impl in kernels)
        pairs = [impl.inplace for _, impl in kernels]
        return Arrays(
            bytes=np.array([v.bytes for v in graph.values], dtype=np.int64),
            required=required,
            producer=producer,
            op=np.array([i for i, _ in kernels], dtype=np.int64),
            first_kernel=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            inputs=Lists.of(inputs),
            outputs=Lists.of([[number[v] for v in impl.outputs] for _, impl in kernels]),
            workspace=np.array([impl.workspace for _, impl in kernels], dtype=np.int64),
            times=times,
            integral=all(isinstance(time, int) for time in times),
            overwritten=np.array([number[p[0]] if p else -1 for p in pairs], dtype=np.int64),
            overwriting=np.array([number[p[1]] if p else -1 for p in pairs], dtype=np.int64),
            mandatory=np.array([not op.optional for op in graph.ops], dtype=np.bool_),
            once=np.array([op.once for op in graph.ops], dtype=np.bool_),
            forward=np.array([op.phase == "forward" for op in graph.ops], dtype=np.bool_),
        )
