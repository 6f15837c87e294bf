"""A straightforward DTR simulator: the definitions of the paper's Appendix C, with an object for every storage.

The pool is a list, and each choice a loop over it that looks at every storage's neighbours. Recoup's own simulator is
measured against it, and, as nothing is remembered here between two choices, checked against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from recoup.online.simulator import OutOfMemory, Thrashing

Neighbours = Literal["none", "all", "above", "components"]
MEASURES: dict[str, tuple[Neighbours, bool, bool, bool]] = {  # what is around, cost, size, staleness
    "dtr": ("all", True, True, True),
    "dtr-eq": ("components", True, True, True),
    "dtr-local": ("none", True, True, True),
    "e-star": ("all", True, True, False),
    "msps": ("above", True, True, False),
    "lru": ("none", False, False, True),
    "largest": ("none", False, True, False),
}


class Storage:
    """Bytes that come and go."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.cost = 0.0
        self.last_access = 0.0
        self.resident = False
        self.pinned = False
        self.locks = 0
        self.references = 0
        self.tensors: list[Tensor] = []
        self.component: Component | None = None  # since it was last evicted

    def dependencies(self) -> set[Storage]:
        """What its views' operators read."""
        return {read.storage for tensor in self.tensors for read in tensor.op.inputs} - {self}

    def dependents(self) -> set[Storage]:
        """What is made by operators that read its views."""
        return {made.storage for tensor in self.tensors for op in tensor.readers for made in op.outputs} - {self}

    def evicted_ancestors(self) -> set[Storage]:
        """What is not there and needed to make this again."""
        found: set[Storage] = set()
        stack = [self]
        while stack:
            for other in stack.pop().dependencies():
                if not other.resident and other not in found:
                    found.add(other)
                    stack.append(other)
        return found

    def evicted_descendants(self) -> set[Storage]:
        """What is not there and needs this."""
        found: set[Storage] = set()
        stack = [self]
        while stack:
            for other in stack.pop().dependents():
                if not other.resident and other not in found:
                    found.add(other)
                    stack.append(other)
        return found

    def components(self) -> set[Component]:
        """The components next to it."""
        near = self.dependencies() | self.dependents()
        return {other.component.root() for other in near if not other.resident and other.component is not None}


class Component:
    """Evicted storages next to each other, as a tree of union-find."""

    def __init__(self, total: float) -> None:
        self.parent = self
        self.total = total

    def root(self) -> Component:
        """The one that stands for all."""
        root = self
        while root.parent is not root:
            root = root.parent
        node = self
        while node is not root:
            node.parent, node = root, node.parent
        return root


class Tensor:
    """A view of a storage, made by an operator."""

    def __init__(self, storage: Storage, op: Op) -> None:
        self.storage = storage
        self.op = op
        self.readers: list[Op] = []
        self.defined = False
        self.references = 1


class Op:
    """An operator, to be run again."""

    def __init__(self, inputs: list[Tensor], cost: float) -> None:
        self.inputs = inputs
        self.outputs: list[Tensor] = []
        self.cost = cost
        self.size = 0


class ObjectRun:
    """One run under a budget; what the program releases is evicted at once, unless told otherwise."""

    def __init__(
        self, budget: int | None, heuristic: str = "dtr", eager: bool = True, limit: float | None = None
    ) -> None:
        self.budget = math.inf if budget is None else budget
        self.neighbours, self.by_cost, self.by_size, self.by_staleness = MEASURES[heuristic]
        self.eager = eager
        self.limit = math.inf if limit is None else limit
        self.clock = 1.0
        self.memory = 0
        self.peak = 0
        self.base_cost = 0.0
        self.rematerializations = 0
        self.evictions = 0
        self.tensors: list[Tensor] = []
        self.pool: list[Storage] = []

    @property
    def total_cost(self) -> float:
        """Everything that was computed."""
        return self.clock - 1

    # what a program does

    def constant(self, size: int) -> int:
        """An input or a parameter."""
        [number] = self._declare([], [size], [None], 0)
        storage = self.tensors[number].storage
        self._make_room(size)
        storage.resident = storage.pinned = self.tensors[number].defined = True
        self._use(size)
        return number

    def call(
        self, inputs: Sequence[int], sizes: Sequence[int], cost: float, aliases: Sequence[int | None] | None = None
    ) -> list[int]:
        """Run a new operator."""
        made = self._declare([self.tensors[i] for i in inputs], sizes, aliases or [None] * len(sizes), cost)
        self.base_cost += cost
        self._run(self.tensors[made[0]].op, None)
        return made

    def retain(self, tensor: int) -> None:
        """One more reference."""
        self.tensors[tensor].references += 1
        self.tensors[tensor].storage.references += 1

    def release(self, tensor: int) -> None:
        """One reference less."""
        storage = self.tensors[tensor].storage
        self.tensors[tensor].references -= 1
        storage.references -= 1
        if storage.references == 0 and self.eager and self._evictable(storage):
            self._evict(storage)

    def storage_size(self, tensor: int) -> int:
        """Bytes of the tensor's storage."""
        return self.tensors[tensor].storage.size

    def finish(self) -> None:
        """Bring back what is live, and keep it."""
        for tensor in self.tensors:
            if tensor.references > 0:
                if not tensor.defined:
                    self._run(tensor.op, tensor)
                tensor.storage.pinned = True
                self._leave_pool(tensor.storage)

    # how it is done

    def _declare(
        self, inputs: list[Tensor], sizes: Sequence[int], aliases: Sequence[int | None], cost: float
    ) -> list[int]:
        op = Op(inputs, cost)
        first = len(self.tensors)
        for size, alias in zip(sizes, aliases, strict=True):
            storage = Storage(size) if alias is None else self.tensors[alias].storage
            op.size += size if alias is None else 0
            storage.cost += 0 if any(other.storage is storage for other in op.outputs) else cost
            storage.references += 1
            op.outputs.append(Tensor(storage, op))
            storage.tensors.append(op.outputs[-1])
        for tensor in inputs:
            tensor.readers.append(op)
        self.tensors += op.outputs
        return list(range(first, len(self.tensors)))

    def _run(self, op: Op, asked: Tensor | None) -> None:
        """Run an operator, for the first time or for the tensor asked for."""
        for tensor in op.inputs:
            tensor.storage.last_access = self.clock
        missing = [tensor for tensor in op.inputs if not tensor.defined]
        for tensor in op.inputs:
            if tensor.defined:
                self._lock(tensor.storage)
        for tensor in missing:
            if not tensor.defined:
                self._run(tensor.op, tensor)
            self._lock(tensor.storage)
        self._make_room(op.size)
        self.peak = max(self.peak, self.memory + op.size)
        self.clock += op.cost
        self.rematerializations += asked is not None
        if self.base_cost and self.total_cost > self.limit * self.base_cost:
            raise Thrashing("the operators took too long")
        joining = []
        for tensor in op.outputs:
            if not tensor.defined:
                tensor.defined = True
                if not tensor.storage.resident:
                    self._bring(tensor.storage)
                    joining.append(tensor.storage)
                if asked is None:
                    tensor.storage.last_access = self.clock
        if asked is not None and asked.storage in joining:
            joining.remove(asked.storage)
            joining.append(asked.storage)
        for storage in joining:
            self._join_pool(storage)
        for tensor in op.inputs:
            tensor.storage.locks -= 1
            self._join_pool(tensor.storage)

    def _bring(self, storage: Storage) -> None:
        storage.resident = True
        self._use(storage.size)
        if storage.component is not None:
            storage.component.root().total -= storage.cost

    def _use(self, size: int) -> None:
        self.memory += size
        self.peak = max(self.peak, self.memory)

    def _lock(self, storage: Storage) -> None:
        storage.locks += 1
        self._leave_pool(storage)

    def _evictable(self, storage: Storage) -> bool:
        return storage.resident and storage.locks == 0 and not storage.pinned

    def _join_pool(self, storage: Storage) -> None:
        if self._evictable(storage) and storage not in self.pool:
            self.pool.append(storage)

    def _leave_pool(self, storage: Storage) -> None:
        if storage in self.pool:
            self.pool.remove(storage)

    def _make_room(self, size: int) -> None:
        while self.memory + size > self.budget:
            if not self.pool:
                raise OutOfMemory("nothing can be evicted")
            self._evict(self._victim())

    def _victim(self) -> Storage:
        victim, lowest = None, math.inf
        for storage in self.pool:
            score = self._score(storage)
            if score == 0:
                return storage
            if score <= lowest:
                victim, lowest = storage, score
        assert victim is not None
        return victim

    def _score(self, storage: Storage) -> float:
        below = 1.0
        if self.by_size:
            below *= storage.size
        if self.by_staleness:
            below *= self.clock - storage.last_access
        cost = self._cost(storage) if self.by_cost else 1.0
        return cost / below if below else math.inf

    def _cost(self, storage: Storage) -> float:
        if self.neighbours == "components":
            return storage.cost + sum(root.total for root in storage.components())
        found = storage.evicted_ancestors() if self.neighbours != "none" else set()
        if self.neighbours == "all":
            found |= storage.evicted_descendants()
        return storage.cost + sum(other.cost for other in found)

    def _evict(self, storage: Storage) -> None:
        self.evictions += 1
        self._leave_pool(storage)
        storage.resident = False
        self.memory -= storage.size
        for tensor in storage.tensors:
            tensor.defined = False
        if self.neighbours == "components":
            self._join_components(storage)

    def _join_components(self, storage: Storage) -> None:
        storage.component = Component(storage.cost)
        for other in storage.components():
            a, b = storage.component.root(), other.root()
            if a is not b:
                b.parent = a
                a.total += b.total
