"""A checkpoint set turned into a schedule: the S of the baselines, then the cheapest R for it (Appendix B.1).

Checkpoints cut the forward ops into segments; each segment ends with a checkpoint. What is carried into stage t:

- checkpoints and gradients, always;
- another forward value during the forward pass while a forward op still reads it; and in the last segment, which the
  backward pass reaches first, until its backward ops have read it;
- during the backward pass, once the first backward op of a segment has made its values again, the values that
  backward ops of that segment read.

On a linear network this is Chen et al.'s schedule: forward keeps the checkpoints, backward recomputes one segment at a
time from the checkpoint before it. What is carried too long costs nothing: the judge frees after the last use.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator

import numpy as np

from recoup.arrays import Bools
from recoup.graph import Graph
from recoup.schedule import Schedule
from recoup.task import NotApplicableError
from recoup.views.stage_matrices import dependencies, minimal_recomputation, schedule_of


def forward_ops(graph: Graph) -> list[int]:
    """The forward ops that run, in order: the nodes the baselines choose checkpoints from."""
    a = graph.arrays
    return np.flatnonzero(a.mandatory & a.forward).tolist()


def segmented_schedule(graph: Graph, checkpoints: Collection[int]) -> Schedule:
    """The schedule of a checkpoint set (ops, by number)."""
    return cheapest_schedule(graph, carried_values(graph, sorted(checkpoints)))


def carried_values(graph: Graph, checkpoints: list[int]) -> Bools:
    """S for a sorted checkpoint set; see the module's docstring."""
    a, n = graph.arrays, len(graph.ops)
    forward = forward_ops(graph)
    kept = set(checkpoints)
    reads = dependencies(graph)
    segment = {i: bisect_left(checkpoints, i) for i in forward}
    last_segment = segment[forward[-1]] if forward else 0
    loose = {i for i in forward if i not in kept and segment[i] != last_segment}

    S = np.tri(n, n, -1, dtype=np.bool_)  # carried for ever once made
    for i in loose:
        S[:, i] = False
    backward_began: dict[int, int] = {}  # segment to its first backward stage
    for t in range(n):
        if not a.mandatory[t]:
            continue
        mine = loose.intersection(reads[t])
        if a.forward[t]:
            for i in mine:
                S[i + 1 : t + 1, i] = True
        elif mine:
            current = max(segment[i] for i in mine)
            began = backward_began.setdefault(current, t)
            for i in mine:
                if segment[i] == current:
                    S[began + 1 : t + 1, i] = True
    return S


def cheapest_schedule(graph: Graph, S: Bools) -> Schedule:
    """The schedule with the fewest runs that carries what S says, and what may not be made again (``once``)."""
    a = graph.arrays
    inplace = np.flatnonzero(a.overwritten[a.first_kernel[:-1]] >= 0)
    if len(inplace):
        name = graph.ops[inplace[0]].id
        raise NotApplicableError(f"op {name!r} runs in place, and what it overwrites cannot be carried on")
    S[:, ~a.mandatory] = False
    for t in np.flatnonzero(~a.mandatory).tolist()[::-1]:  # no stage of its own: carry through it
        if t + 1 < len(S):
            S[t, :t] = S[t + 1, :t]
    for i in np.flatnonzero(a.once & a.mandatory).tolist():
        S[i + 1 :, i] = True
    return schedule_of(graph, minimal_recomputation(graph, S))


def every_kth(graph: Graph, nodes: list[int]) -> Iterator[Schedule]:
    """Chen et al.'s sqrt(n): n nodes in segments of sqrt(n), each segment's last node a checkpoint."""
    step = max(1, int(len(nodes) ** 0.5))
    yield segmented_schedule(graph, nodes[step - 1 :: step])


def equal_memory(graph: Graph, nodes: list[int], settings: int = 200) -> Iterator[Schedule]:
    """Chen et al.'s greedy: close a segment at the next node once it holds more than b bytes; for every b that matters.

    A segment's bytes are a sum of consecutive outputs, so those sums are the b's to try; where there are more than
    ``settings``, evenly spaced ones of them.
    """
    a = graph.arrays
    order = forward_ops(graph)
    size = [int(a.bytes[a.outputs[int(a.first_kernel[i])]].sum()) for i in order]
    total = np.concatenate([[0], np.cumsum(size)])
    begins = total[np.unique(np.linspace(0, len(total) - 1, settings).astype(np.int64))]
    sums = np.unique(total[None, :] - begins[:, None])
    sums = sums[sums >= 0]
    if len(sums) > settings:
        sums = sums[np.linspace(0, len(sums) - 1, settings).astype(np.int64)]
    candidates = set(nodes)
    tried: set[tuple[int, ...]] = set()
    for b in sums.tolist():
        held, chosen = 0, []
        for i, bytes_ in zip(order, size, strict=True):
            held += bytes_
            if held > b and i in candidates:
                chosen.append(i)
                held = 0
        if tuple(chosen) not in tried:
            tried.add(tuple(chosen))
            yield segmented_schedule(graph, chosen)


def require_linear(graph: Graph) -> list[int]:
    """The forward ops, if each reads just the one before it; the original heuristics know no other networks."""
    forward = forward_ops(graph)
    reads = dependencies(graph)
    before = None
    for i in forward:
        if reads[i] != ([] if before is None else [before]):
            sources = ", ".join(repr(graph.ops[k].id) for k in reads[i]) or "no other op"
            raise NotApplicableError(
                f"the forward pass is not linear: op {graph.ops[i].id!r} reads from {sources}"
                + (f", not from {graph.ops[before].id!r} alone" if before is not None else "")
            )
        before = i
    return forward
