"""Linearized sqrt(n) and greedy (Appendix B.2): any network, read as the line of its forward ops in order."""

from __future__ import annotations

from collections.abc import Iterator

from recoup.graph import Graph
from recoup.planners.policy import equal_memory, every_kth, forward_ops
from recoup.schedule import Schedule


def sqrt(graph: Graph) -> Iterator[Schedule]:
    """Every sqrt(n)-th forward op is a checkpoint."""
    yield from every_kth(graph, forward_ops(graph))


def greedy(graph: Graph) -> Iterator[Schedule]:
    """Segments of about b bytes, for every b."""
    yield from equal_memory(graph, forward_ops(graph))
