"""Griewank and Walther's REVOLVE on linear networks, for every number of snapshots.

The backward pass needs the states (outputs of the forward ops) last to first; a state that is not stored is advanced to
from the nearest stored one. With ``s`` snapshots, REVOLVE stores them at binomial distances, which needs the fewest
advances when all layers cost the same. The loss and the first layer's input are always at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import comb

import numpy as np

from recoup.arrays import Bools
from recoup.graph import Graph
from recoup.planners.policy import cheapest_schedule, require_linear
from recoup.schedule import Schedule
from recoup.views.stage_matrices import dependencies


def candidates(graph: Graph) -> Iterator[Schedule]:
    """The REVOLVE schedule for each number of snapshots, most snapshots first."""
    states = require_linear(graph)[:-1]
    for snapshots in range(len(states), -1, -1):
        yield cheapest_schedule(graph, carried_values(graph, states, stored_states(len(states), snapshots)))


def fewest_advances(states: int, snapshots: int) -> int:
    """Advances needed to visit ``states`` states in reverse, starting from a stored state before the first.

    Griewank and Walther's formula for ``states + 1`` steps and ``snapshots + 1`` checkpoints: with r the fewest
    repetitions for which binomial(s + r, s) steps suffice, it is r * steps - binomial(s + r, s + 1).
    """
    steps, slots = states + 1, snapshots + 1
    repeats = 0
    while comb(slots + repeats, slots) < steps:
        repeats += 1
    return repeats * steps - comb(slots + repeats, slots + 1)


def first_snapshot(states: int, snapshots: int) -> int:
    """Which of ``states`` states (1 is the first) to store first, so that the rest needs fewest advances."""
    goal = fewest_advances(states, snapshots)
    for m in range(1, states + 1):
        above = fewest_advances(states - m, snapshots - 1)
        below = fewest_advances(m - 1, snapshots)
        if m + above + below == goal:
            return m
    raise AssertionError("Griewank and Walther's formula has a split for every length")


def stored_states(states: int, snapshots: int) -> dict[int, frozenset[int]]:
    """For each state, in the order the backward pass visits them, which states are stored while it is visited."""
    stored: dict[int, frozenset[int]] = {}
    work = [(0, states, snapshots, frozenset[int]())]  # visit hi..lo+1 from stored lo, with free snapshots
    while work:
        lo, hi, free, held = work.pop()
        if hi == lo:
            continue
        if free == 0:
            stored |= {p: held | {p} for p in range(hi, lo, -1)}
            continue
        m = lo + first_snapshot(hi - lo, free)
        work.append((lo, m - 1, free, held))  # after m itself
        work.append((m - 1, m, 0, held))  # m, which is stored
        work.append((m, hi, free - 1, held | {m}))
    return stored


def carried_values(graph: Graph, states: list[int], stored: dict[int, frozenset[int]]) -> Bools:
    """S for REVOLVE: at each backward op, the snapshots that were there before it and still are."""
    a, n = graph.arrays, len(graph.ops)
    position = {op: p for p, op in enumerate(states, start=1)}
    reads = [[i for i in needs if i in position] for needs in dependencies(graph)]
    top = stored.get(len(states), frozenset())
    S = np.tri(n, n, -1, dtype=np.bool_)
    S[:, states] = False
    before, carried = top, top
    previous: set[int] = set()
    for t in range(n):
        if a.forward[t] or not a.mandatory[t]:
            S[t, [op for op in states if op < t and (position[op] in top or op == t - 1)]] = True
            continue
        mine = {position[i] for i in reads[t]}
        carried = stored[max(mine)] if mine else before
        keep = (before & carried) | (mine & previous)
        S[t, [states[p - 1] for p in keep]] = True
        before, previous = carried, mine
    return S
