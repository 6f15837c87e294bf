"""Chen et al. (2016): training deep nets with sublinear memory cost, on linear networks only."""

from __future__ import annotations

from collections.abc import Iterator

from recoup.graph import Graph
from recoup.planners.policy import equal_memory, every_kth, require_linear
from recoup.schedule import Schedule


def sqrt(graph: Graph) -> Iterator[Schedule]:
    """sqrt(n) segments of sqrt(n) layers."""
    yield from every_kth(graph, require_linear(graph))


def greedy(graph: Graph) -> Iterator[Schedule]:
    """Segments of about b bytes, for every b."""
    yield from equal_memory(graph, require_linear(graph))
