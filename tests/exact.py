"""Exact search on small graphs, written straight from the rules and sharing no code with the library.

A state is which values are live; runs cost their time, dropping a value costs nothing. Dijkstra's algorithm with the
cost of the first runs still to come as its estimate.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from functools import cache
from itertools import count

from recoup import Graph

State = tuple[int, int, int, int]  # next first run, position within the stage, live values, ops that have run


class _Model:
    def __init__(self, graph: Graph, budget: int) -> None:
        self.room = budget - graph.resident_bytes
        made = {v for op in graph.ops for impl in op.implementations for v in impl.outputs}
        self.bit = {v.id: 1 << i for i, v in enumerate(graph.values) if v.id in made}
        self.size = {self.bit[v.id]: v.bytes for v in graph.values if v.id in made}
        self.required = self.mask(v for v in graph.outputs if v in made)
        self.masks = [[self._masks(impl) for impl in op.implementations] for op in graph.ops]
        self.bytes = cache(self._bytes)
        self.rest = [0.0] * (len(graph.ops) + 1)
        for i in range(len(graph.ops) - 1, -1, -1):
            fastest = 0 if graph.ops[i].optional else min(impl.time for impl in graph.ops[i].implementations)
            self.rest[i] = self.rest[i + 1] + fastest

    def mask(self, values) -> int:
        total = 0
        for value in values:
            total |= self.bit.get(value, 0)
        return total

    def _masks(self, impl) -> tuple[int, int, int, int, int]:
        """What it reads, writes, replaces and writes over, and the bytes that it needs besides what is live."""
        writes = self.mask(impl.outputs)
        over = self.mask(impl.inplace[:1]) if impl.inplace else 0
        new = writes & ~(self.mask(impl.inplace[1:]) if impl.inplace else 0)
        return self.mask(impl.inputs), writes, writes & ~self.required, over, self._bytes(new) + impl.workspace

    def _bytes(self, live: int) -> int:
        return sum(size for bit, size in self.size.items() if live & bit)

    def run(self, live: int, op: int, choice: int) -> int | None:
        """The live values after running one implementation; None if it cannot run."""
        reads, writes, replaced, over, more = self.masks[op][choice]
        if reads & ~live:
            return None
        live &= ~replaced  # an old copy that is about to be replaced need not be there
        if self.bytes(live) + more > self.room:
            return None
        return (live | writes) & ~over


def _cheapest(model: _Model, start: State, moves, done) -> float:
    """The least cost from the start to a state that is done; infinity if there is none."""
    if model.room < 0:
        return math.inf
    best = {start: 0.0}
    tie = count()
    queue = [(model.rest[0], 0, next(tie), start)]
    while queue:
        _, cost, _, state = heapq.heappop(queue)
        if best[state] < cost:
            continue
        if done(state):
            return cost
        for after, time in moves(state):
            total = cost + time
            if total < best.get(after, math.inf):
                best[after] = total
                heapq.heappush(queue, (total + model.rest[after[0]], total, next(tie), after))
    return math.inf


def _drops(model: _Model, state: State) -> Iterator[tuple[State, float]]:
    t, k, live, ran = state
    loose = live & ~model.required
    while loose:
        bit = loose & -loose
        loose ^= bit
        yield (t, k, live ^ bit, ran), 0


def cheapest(graph: Graph, budget: int) -> float:
    """The least cost of any schedule with the graph's first-run order, implementations and optional ops included.

    The order is that of the ops that must run; an optional op may first run anywhere from its place on.
    """
    model = _Model(graph, budget)

    def moves(state: State) -> Iterator[tuple[State, float]]:
        t, _, live, ran = state
        yield from _drops(model, state)
        for i in range(min(t + 1, len(graph.ops))):
            op = graph.ops[i]
            again = i < t
            ran_before = bool(ran >> i & 1)
            if again and ((not ran_before and not op.optional) or (ran_before and op.once)):
                continue
            for choice, impl in enumerate(op.implementations):
                after = model.run(live, i, choice)
                if after is not None:
                    yield (max(t, i + 1), 0, after, ran | 1 << i), impl.time
        if t < len(graph.ops) and graph.ops[t].optional:
            yield (t + 1, 0, live, ran), 0

    return _cheapest(model, (0, 0, 0, 0), moves, lambda s: s[0] == len(graph.ops) and not model.required & ~s[2])


def cheapest_stage_once(graph: Graph, budget: int) -> float:
    """The least cost of the paper's schedules: each op at most once per stage, in order, first implementations."""
    model = _Model(graph, budget)
    n = len(graph.ops)

    def moves(state: State) -> Iterator[tuple[State, float]]:
        t, k, live, ran = state
        yield from _drops(model, state)
        op = graph.ops[k]
        if op.optional:
            yield ((t, k + 1, live, ran) if k < t else (t + 1, 0, live, ran)), 0
            return
        if k < t:
            yield (t, k + 1, live, ran), 0
        if k == t or not op.once:
            after = model.run(live, k, 0)
            if after is not None:
                yield ((t, k + 1, after, ran) if k < t else (t + 1, 0, after, ran)), op.time

    return _cheapest(model, (0, 0, 0, 0), moves, lambda s: s[0] == n)


def smallest_budget(graph: Graph) -> int:
    """The smallest budget at which some schedule exists, by bisection."""
    low, high = graph.resident_bytes - 1, graph.resident_bytes + 2 * sum(v.bytes for v in graph.values) + 100
    while high - low > 1:
        middle = (low + high) // 2
        if math.isfinite(cheapest(graph, middle)):
            high = middle
        else:
            low = middle
    return high
