"""The graph: what one training step computes. Immutable, and valid once it exists.

A *value* is a storage. An *op* reads values and writes values; it may have several *implementations* to choose from,
of which the first is the one a planner takes that does not choose. Ops are listed in a valid execution order, the
program's own. A value that no op makes is an input: resident all along and counted in ``resident_bytes``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from recoup.errors import GraphError

if TYPE_CHECKING:
    from recoup.arrays import Arrays

Phase = Literal["forward", "backward"]

_LIMIT = 2**62  # every memory total stays well inside a signed 64-bit integer


@dataclass(frozen=True, slots=True)
class Value:
    """A storage of ``bytes`` bytes; ``scales`` says whether it grows with the batch."""

    id: str
    bytes: int
    scales: bool = True


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run an op: what it reads and writes, how long it takes, what it needs on the side.

    ``inplace=(input, output)`` writes that output over that input: no bytes are added, and the input is gone
    afterwards.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    time: float
    workspace: int = 0
    inplace: tuple[str, str] | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Op:
    """A node of the graph. The properties speak of the first implementation."""

    id: str
    implementations: tuple[Implementation, ...]
    name: str = ""
    phase: Phase = "forward"
    optional: bool = False
    once: bool = False
    meta: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "meta", copy.deepcopy(self.meta))  # the caller's may change, the graph does not

    @property
    def inputs(self) -> tuple[str, ...]:
        """What the first implementation reads."""
        return self.implementations[0].inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the first implementation writes."""
        return self.implementations[0].outputs

    @property
    def time(self) -> float:
        """How long the first implementation takes, in the graph's time unit."""
        return self.implementations[0].time

    @property
    def workspace(self) -> int:
        """Bytes the first implementation needs while it runs, besides what it reads and writes."""
        return self.implementations[0].workspace


@dataclass(frozen=True)
class Graph:
    """Ops, values, what must be there at the end, and what is resident all along.

    Build one with :class:`recoup.GraphBuilder`, or read one with :meth:`load`. Equal graphs have equal
    fingerprints.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...] = ()
    resident_bytes: int = 0
    resident_scaling_bytes: int = 0
    name: str = ""
    time_unit: str = "s"

    value_index: Mapping[str, int] = field(init=False, repr=False, compare=False)
    op_index: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for key in ("values", "ops", "outputs"):
            object.__setattr__(self, key, tuple(getattr(self, key)))
        object.__setattr__(self, "value_index", _index((v.id for v in self.values), "value"))
        object.__setattr__(self, "op_index", _index((o.id for o in self.ops), "op"))
        _check(self)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.ops)} ops, {len(self.values)} values)"

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Value id to the index of the op that makes it; inputs are absent."""
        return {v: i for i, op in enumerate(self.ops) for impl in op.implementations for v in impl.outputs}

    @cached_property
    def arrays(self) -> Arrays:
        """The same graph as flat arrays, for the judge and the planners."""
        from recoup.arrays import Arrays

        return Arrays.of(self)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the graph's file: the same for the same graph, on any machine."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def scaled(self, batch: int) -> Graph:
        """The same step with every size that scales multiplied by ``batch``; times stay those of one batch.

        Workspaces are taken to scale: reserving too much for one keeps the budget, too little breaks it.
        """
        from dataclasses import replace

        def grow(op: Op) -> Op:
            impls = tuple(replace(i, workspace=i.workspace * batch) for i in op.implementations)
            return replace(op, implementations=impls)

        extra = self.resident_scaling_bytes * (batch - 1)
        return replace(
            self,
            values=tuple(replace(v, bytes=v.bytes * batch) if v.scales else v for v in self.values),
            ops=tuple(map(grow, self.ops)),
            resident_bytes=self.resident_bytes + extra,
            resident_scaling_bytes=self.resident_scaling_bytes + extra,
        )

    def without_choices(self) -> Graph:
        """The same step with first implementations only and no optional ops: what is planned when nobody chooses."""
        from dataclasses import replace

        ops = (replace(op, implementations=op.implementations[:1]) for op in self.ops if not op.optional)
        return replace(self, ops=tuple(ops))

    def to_json(self) -> str:
        """The graph as ``recoup-graph`` JSON. The same graph always gives the same bytes."""
        from recoup.graph_json import dump

        return dump(self)

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` to a file, all of it or nothing."""
        from recoup.files import write_text

        write_text(path, self.to_json())

    @staticmethod
    def from_json(text: str | bytes) -> Graph:
        """Read ``recoup-graph`` JSON; raises :class:`GraphError` on anything that is not a valid graph."""
        from recoup.graph_json import parse

        return parse(text)

    @staticmethod
    def load(path: str | Path) -> Graph:
        """Read a ``recoup-graph`` file."""
        from recoup.files import read_bytes

        return Graph.from_json(read_bytes(path, GraphError))


def _index(ids: Iterable[str], kind: str) -> dict[str, int]:
    index: dict[str, int] = {}
    for position, name in enumerate(ids):
        if not isinstance(name, str):
            raise GraphError(f"the id of every {kind} must be a string, not {name!r}")
        if name in index:
            raise GraphError(f"two {kind}s are called {name!r}")
        index[name] = position
    return index


def _check(graph: Graph) -> None:
    """Raise :class:`GraphError` unless the graph obeys every rule of the format."""
    for value in graph.values:
        _check_count(value.bytes, f"value {value.id!r}: bytes")
    _check_count(graph.resident_bytes, "resident_bytes")
    _check_count(graph.resident_scaling_bytes, "resident_scaling_bytes")
    if graph.resident_scaling_bytes > graph.resident_bytes:
        raise GraphError(
            f"resident_scaling_bytes ({graph.resident_scaling_bytes}) is a part of resident_bytes "
            f"({graph.resident_bytes}) and cannot be more"
        )
    if len(set(graph.outputs)) != len(graph.outputs):
        raise GraphError("outputs lists a value twice")
    for name in graph.outputs:
        if name not in graph.value_index:
            raise GraphError(f"outputs lists {name!r}, which is not a value of the graph")
    maker = _producers(graph)
    _check_order(graph, maker)
    for op in graph.ops:
        for impl in op.implementations:
            _check_implementation(graph, op, impl, maker)
        if op.meta is not None:
            _check_meta(op)
    _check_default_schedule(graph, maker)
    workspaces = [impl.workspace for op in graph.ops for impl in op.implementations]
    if graph.resident_bytes + 2 * sum(v.bytes for v in graph.values) + max(workspaces, default=0) >= _LIMIT:
        raise GraphError("the graph's sizes add up to more than 2^62 bytes")


def _check_count(number: int, what: str) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise GraphError(f"{what} must be a whole number, not {number!r}")
    if number < 0:
        raise GraphError(f"{what} is negative ({number})")


def _check_meta(op: Op) -> None:
    try:
        json.dumps(op.meta, allow_nan=False)
    except (TypeError, ValueError) as problem:
        raise GraphError(f"op {op.id!r}: meta cannot be written as JSON: {problem}") from None


def _producers(graph: Graph) -> dict[str, int]:
    maker: dict[str, int] = {}
    for index, op in enumerate(graph.ops):
        if op.phase not in ("forward", "backward"):
            raise GraphError(f"op {op.id!r}: phase must be 'forward' or 'backward', not {op.phase!r}")
        if not op.implementations:
            raise GraphError(f"op {op.id!r} has no implementation")
        names = [impl.name for impl in op.implementations]
        if len(set(names)) != len(names):
            raise GraphError(f"op {op.id!r}: two implementations have the same name")
        for impl in op.implementations:
            for value in (*impl.inputs, *impl.outputs):
                if value not in graph.value_index:
                    raise GraphError(f"op {op.id!r} names the value {value!r}, which the graph does not have")
            if len(set(impl.outputs)) != len(impl.outputs):
                raise GraphError(f"op {op.id!r} writes a value twice")
            for value in impl.outputs:
                if maker.setdefault(value, index) != index:
                    first = graph.ops[maker[value]].id
                    raise GraphError(f"value {value!r} has two producers: op {first!r} and op {op.id!r}")
    return maker


def _check_order(graph: Graph, maker: Mapping[str, int]) -> None:
    for index, op in enumerate(graph.ops):
        for impl in op.implementations:
            for value in impl.inputs:
                source = maker.get(value, -1)
                if source < index:
                    continue
                cycle = _find_cycle(graph, maker)
                if cycle:
                    raise GraphError(f"op {cycle[0]!r} is on a cycle: {' -> '.join([*cycle, cycle[0]])}")
                raise GraphError(
                    f"op {op.id!r} reads {value!r}, which op {graph.ops[source].id!r} makes only later: "
                    "list the ops in an order in which they can run"
                )


def _find_cycle(graph: Graph, maker: Mapping[str, int]) -> list[str]:
    """A cycle of op ids, found by removing ops nobody waits for; empty if there is none."""
    needs = [{maker[v] for impl in op.implementations for v in impl.inputs if v in maker} for op in graph.ops]
    users: list[list[int]] = [[] for _ in graph.ops]
    for index, sources in enumerate(needs):
        for source in sources:
            users[source].append(index)
    waiting = [len(sources) for sources in needs]
    ready = [i for i, count in enumerate(waiting) if count == 0]
    while ready:
        for user in users[ready.pop()]:
            waiting[user] -= 1
            if waiting[user] == 0:
                ready.append(user)
    stuck = {i for i, count in enumerate(waiting) if count}
    if not stuck:
        return []
    path = [min(stuck)]
    while len(set(path)) == len(path):
        path.append(min(needs[path[-1]] & stuck))
    loop = path[path.index(path[-1]) : -1][::-1]
    begin = loop.index(min(loop))
    return [graph.ops[i].id for i in loop[begin:] + loop[:begin]]


def _check_implementation(graph: Graph, op: Op, impl: Implementation, maker: Mapping[str, int]) -> None:
    where = f"op {op.id!r}" + (f", implementation {impl.name!r}" if impl.name else "")
    if isinstance(impl.time, bool) or not isinstance(impl.time, int | float):
        raise GraphError(f"{where}: time must be a number, not {impl.time!r}")
    if isinstance(impl.time, float) and not math.isfinite(impl.time):
        raise GraphError(f"{where}: time is {impl.time}")
    if impl.time < 0:
        raise GraphError(f"{where}: time is negative ({impl.time})")
    if impl.time > 1e300:
        raise GraphError(f"{where}: time is larger than 1e300")
    _check_count(impl.workspace, f"{where}: workspace")
    if impl.inplace is None:
        return
    if len(impl.inplace) != 2:
        raise GraphError(f"{where}: inplace must be (input, output)")
    source, target = impl.inplace
    if source not in impl.inputs or target not in impl.outputs:
        raise GraphError(f"{where}: inplace must name one of its inputs and one of its outputs")
    if source not in maker:
        raise GraphError(f"{where} would overwrite {source!r}, which is resident")
    if source in graph.outputs:
        raise GraphError(f"{where} would overwrite {source!r}, which is a required output")
    first, second = (graph.values[graph.value_index[v]] for v in (source, target))
    if first.bytes != second.bytes:
        sizes = f"{first.bytes} and {second.bytes} bytes"
        raise GraphError(f"{where}: {source!r} and {target!r} share memory but differ in size ({sizes})")
    if first.scales != second.scales:
        raise GraphError(f"{where}: {source!r} and {target!r} share memory but only one scales with the batch")


def _check_default_schedule(graph: Graph, maker: Mapping[str, int]) -> None:
    """The listed order, first implementations, optional ops left out, must run: it is what 'base' means."""
    gone: dict[str, str] = {}
    made: set[str] = set()
    for op in graph.ops:
        if op.optional:
            continue
        for value in op.inputs:
            if value not in maker:
                continue
            if value in gone:
                raise GraphError(f"op {op.id!r} reads {value!r}, which op {gone[value]!r} overwrote in place")
            if value not in made:
                source = graph.ops[maker[value]].id
                raise GraphError(
                    f"op {op.id!r} reads {value!r} in its first implementation, which op {source!r} makes "
                    "only in another implementation or as an optional op"
                )
        made.update(op.outputs)
        inplace = op.implementations[0].inplace
        if inplace is not None:
            gone[inplace[0]] = op.id
    for value in graph.outputs:
        if value in maker and value not in made:
            raise GraphError(f"required output {value!r} is not made by any op's first implementation")
