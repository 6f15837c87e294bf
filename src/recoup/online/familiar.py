"""A step that is known to the last operator. As long as the program repeats it, most of its operators pass at a glance.

Keeping books of an operator costs more than PyTorch needs to start it. Where nothing that it makes will ever be made
again (because all fits, or because the plan that is followed says so), nobody will ask for them. What passed is not
known afterwards, so that it cannot be evicted if the program then leaves its course: it is counted by the allocator,
which is why this is for devices that have one that counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from recoup.graph import Graph
from recoup.online.learned import TIMED_RUNS, Learned
from recoup.online.orders import Order
from recoup.schedule import Schedule


class Glance:
    """All that is looked at of an operator: which one, and the shape of its first argument."""

    __slots__ = ("func", "highest", "known", "light", "memory", "shape")

    def __init__(self, func: Any, args: tuple[Any, ...], known: Learned, memory: int, light: bool) -> None:
        self.func = func
        self.shape = args[0].shape if args and isinstance(args[0], torch.Tensor) else None
        self.known = known
        self.memory = memory
        """Bytes that were allocated when it came."""
        self.highest = memory
        """Bytes that were allocated while it ran."""
        self.light = light and known.runs >= TIMED_RUNS
        """Whether it may pass."""

    def fits(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether a call is this operator's."""
        if func is not self.func:
            return False
        return self.shape is None or (isinstance(args[0], torch.Tensor) and args[0].shape == self.shape)


def remembered(schedule: Schedule, orders: Iterable[Iterable[Order]]) -> set[int]:
    """The operators of a step that must be known while its plan is followed: what it runs again or evicts, and all
    that this is made from."""
    graph = schedule.graph
    maker = _makers(graph)
    stack = [maker[value] for before in orders for order in before for value in order.values if value in maker]
    found: set[int] = set()
    while stack:
        position = stack.pop()
        if position not in found:
            found.add(position)
            for implementation in graph.ops[graph.op_index[str(position)]].implementations:
                stack += [maker[int(value)] for value in implementation.inputs if int(value) in maker]
    return found


def _makers(graph: Graph) -> dict[int, int]:
    return {int(value): int(op.id) for op in graph.ops for value in op.outputs}
