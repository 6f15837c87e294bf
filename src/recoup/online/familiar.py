"""A step that is known to the last operator. As long as the program repeats it, most of its operators pass at a glance.

Keeping books of an operator costs more than PyTorch needs to start it. Where nothing that it makes will ever be made
again (because all fits, or because the plan that is followed says so), nobody will ask for them. What passed is not
known afterwards, so that it cannot be evicted if the program then leaves its course, unless C++ followed the plan and
wrote it down: it is counted by the allocator, which is why this is for devices that have one that counts.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

import torch

from recoup.online.learned import TIMED_RUNS, Learned, canonical
from recoup.online.operators import Traits, number_places
from recoup.online.orders import Order
from recoup.schedule import Schedule


class Glance:
    """All that is looked at of an operator: which one, the shapes of its arguments, and numbers that may be sizes."""

    __slots__ = ("func", "highest", "known", "later", "light", "memory", "shapes", "traits")

    def __init__(
        self, func: Any, args: tuple[Any, ...], traits: Traits, known: Learned, memory: int, light: bool
    ) -> None:
        self.func = canonical(func)
        self.shapes = _shapes(args, number_places(func))
        self.traits = traits
        self.known = known
        self.memory = memory
        """Bytes that were allocated when it came."""
        self.highest = memory
        """Bytes that were allocated while it ran."""
        self.later = memory
        """And at most from then on, to the end of the step."""
        self.light = light and known.runs >= TIMED_RUNS
        """Whether it may pass."""

    def passes_alone(self, is_remembered: bool) -> bool:
        """Whether it needs no Python even where a plan is followed, and must know what it makes."""
        simple = self.traits.simple if is_remembered else not self.traits.moves_storage
        return simple and self.known.runs >= TIMED_RUNS

    def fits(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether a call is this operator's."""
        return canonical(func) is self.func and _shapes(args, number_places(func)) == self.shapes


def look_ahead(step: Sequence[Glance]) -> None:
    """The step is known to its end: what will be allocated at most."""
    highest = 0
    for glance in reversed(step):
        highest = glance.later = max(highest, glance.highest)


def _shapes(args: Sequence[Any], numbers: Container[int] = ()) -> list[Any]:
    """And whole numbers, but those in place of tensors. A float is no size; a rate may decay."""
    found: list[Any] = []
    for at, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            found.append(value.shape)
        elif isinstance(value, list | tuple):
            found.append(_shapes(value))
        elif isinstance(value, int) and at not in numbers:
            found.append(value)
    return found


def remembered(
    schedule: Schedule, orders: Sequence[Sequence[Order]], ends: Mapping[int, int], holds: Collection[int]
) -> tuple[set[int], set[int]]:
    """The operators of a step that must be known while its plan is followed: those that make what it evicts, or holds
    for later, and what they read as far as that is not there any more when they run again, which comes second.
    ``ends`` is when a value goes that is not evicted."""
    graph = schedule.graph
    maker = {int(value): int(op.id) for op in graph.ops for value in op.outputs}
    stack = [(value, 0) for value in holds]
    last: dict[int, tuple[int, bool]] = {}
    for at, before in enumerate(orders):
        for order in before:
            values = [value for value in order.values if not (order.evict and value in holds)]
            stack += [(value, at) for value in values]
            last.update((value, (at, order.evict)) for value in values)
    for value, (at, is_away) in last.items():
        end = ends.get(value, len(orders))
        if is_away and at < end:  # the program may look at it for as long as it holds it
            stack.append((value, end - 1))
    seen: set[tuple[int, int]] = set()
    lost: set[int] = set()
    while stack:
        value, at = one = stack.pop()
        if one in seen or value not in maker:
            continue
        seen.add(one)
        reads = map(int, graph.ops[graph.op_index[str(maker[value])]].inputs)
        missing = [read for read in reads if ends.get(read, len(orders)) <= at]
        stack += [(read, at) for read in missing]
        lost.update(missing)
    return {maker[value] for value, _ in seen}, lost
