"""AP sqrt(n) and AP greedy (Appendix B.1): checkpoints only where the forward network is one value wide.

Articulation points of the undirected forward graph are the vertices whose removal disconnects it: the ends of residual
blocks, not what is inside. The first and the last op count too, so that on a linear network every op is one.
"""

from __future__ import annotations

from collections.abc import Iterator

from recoup.graph import Graph
from recoup.planners.policy import equal_memory, every_kth, forward_ops
from recoup.schedule import Schedule
from recoup.views.stage_matrices import dependencies


def sqrt(graph: Graph) -> Iterator[Schedule]:
    """sqrt(n) segments over the articulation points."""
    yield from every_kth(graph, articulation_points(graph))


def greedy(graph: Graph) -> Iterator[Schedule]:
    """Segments of about b bytes that end at articulation points, for every b."""
    yield from equal_memory(graph, articulation_points(graph))


def articulation_points(graph: Graph) -> list[int]:
    """Articulation points of the forward ops, in order, with the first and the last op."""
    forward = forward_ops(graph)
    inside = set(forward)
    reads = dependencies(graph)
    neighbours: dict[int, list[int]] = {i: [] for i in forward}
    for i in forward:
        for j in reads[i]:
            if j in inside:
                neighbours[i].append(j)
                neighbours[j].append(i)
    points = set(forward[:1] + forward[-1:])
    found: dict[int, int] = {}  # op to its number in depth-first order
    low: dict[int, int] = {}  # the smallest number its subtree reaches by one back edge
    for root in forward:
        if root in found:
            continue
        points |= _visit(root, neighbours, found, low)
    return sorted(points)


def _visit(root: int, neighbours: dict[int, list[int]], found: dict[int, int], low: dict[int, int]) -> set[int]:
    """Hopcroft and Tarjan's search from one root, without recursion."""
    points: set[int] = set()
    found[root] = low[root] = len(found)
    path = [(root, -1, iter(neighbours[root]))]
    branches = 0
    while path:
        node, parent, rest = path[-1]
        for other in rest:
            if other not in found:
                found[other] = low[other] = len(found)
                path.append((other, node, iter(neighbours[other])))
                break
            if other != parent:
                low[node] = min(low[node], found[other])
        else:
            path.pop()
            if parent == root:
                branches += 1
            if parent >= 0:
                low[parent] = min(low[parent], low[node])
                if parent != root and low[node] >= found[parent]:
                    points.add(parent)
    if branches > 1:
        points.add(root)
    return points
