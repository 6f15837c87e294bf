"""A small builder, so that a graph in Python reads like the graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from recoup.errors import GraphError
from recoup.graph import Graph, Implementation, Op, Phase, Value


class GraphBuilder:
    """Collects values and ops in execution order; :meth:`build` validates them.

    >>> b = GraphBuilder("tiny", time_unit="ms", resident_bytes=64)
    >>> x = b.input("x", bytes=64)
    >>> [y] = b.op("double", inputs=[x], outputs={"y": 64}, time=1.5)
    >>> [z] = b.op("square", inputs=[y], outputs={"z": 64}, time=2.0, workspace=16)
    >>> b.build(outputs=[z])
    Graph('tiny', 2 ops, 3 values)
    """

    def __init__(
        self, name: str = "", *, time_unit: str = "s", resident_bytes: int = 0, resident_scaling_bytes: int = 0
    ) -> None:
        self.name = name
        self.time_unit = time_unit
        self.resident_bytes = resident_bytes
        self.resident_scaling_bytes = resident_scaling_bytes
        self._values: dict[str, Value] = {}
        self._ops: list[Op] = []

    def input(self, id: str, bytes: int = 0, *, scales: bool = True) -> str:
        """Declare a value no op makes; its bytes are part of ``resident_bytes`` and not added to it."""
        return self.value(id, bytes, scales=scales)

    def value(self, id: str, bytes: int, *, scales: bool = True) -> str:
        """Declare a value ahead of the op that makes it, for what :meth:`op` cannot say."""
        if id in self._values:
            raise GraphError(f"two values are called {id!r}")
        self._values[id] = Value(id, operator.index(bytes) if isinstance(bytes, Integral) else bytes, scales)
        return id

    def op(
        self,
        id: str,
        *,
        inputs: Iterable[str] = (),
        outputs: Mapping[str, int] | Sequence[str] = (),
        time: float = 0,
        workspace: int = 0,
        implementations: Sequence[Implementation] | None = None,
        name: str = "",
        phase: Phase = "forward",
        optional: bool = False,
        once: bool = False,
        meta: Mapping[str, Any] | None = None,
    ) -> tuple[str, ...]:
        """Add an op and return the ids of what it writes.

        ``outputs`` maps new value ids to bytes, or lists declared values. With ``implementations``, give those
        instead of inputs, outputs, time and workspace, over declared values.
        """
        if isinstance(outputs, Mapping):
            for value, size in outputs.items():
                self.value(value, size)
        if implementations is None:
            implementations = (Implementation(tuple(inputs), tuple(outputs), time, workspace),)
        elif inputs or outputs or time or workspace:
            raise GraphError(f"op {id!r}: give implementations, or inputs, outputs, time and workspace, not both")
        op = Op(id, tuple(implementations), name, phase, optional, once, meta)
        self._ops.append(op)
        return op.outputs if op.implementations else ()

    def build(self, outputs: Iterable[str] = ()) -> Graph:
        """The graph, with the values that must be there at the end."""
        return Graph(
            values=tuple(self._values.values()),
            ops=tuple(self._ops),
            outputs=tuple(outputs),
            resident_bytes=self.resident_bytes,
            resident_scaling_bytes=self.resident_scaling_bytes,
            name=self.name,
            time_unit=self.time_unit,
        )
