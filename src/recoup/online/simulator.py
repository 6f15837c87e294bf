"""The DTR runtime of the paper's Appendix C, without tensors: storages, views, eviction, rematerialisation.

Everything is a number: storages, tensors and operators are positions in lists, so that a heuristic scores the whole
pool with a few array operations. What happens is what happens in the published simulator, step by step: the clock
starts at 1 and advances by an operator's cost; while memory and an operator's outputs exceed the budget, the lowest
score in the pool goes (of equal ones the most recently added; a score of exactly 0 ends the scan); before an operator
runs, all its parents are touched, those that are defined are locked in order, and the others come back in argument
order; afterwards its storages join the pool, siblings first, and then the parents as they are unlocked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from recoup.errors import RecoupError
from recoup.online.metadata import Heuristic, Storages

Deallocation = Literal["eager", "banish", "none"]


class OutOfMemory(RecoupError):  # noqa: N818 - how a simulation ends, more than an error
    """Nothing is left to evict, and what is asked for does not fit."""


class Thrashing(RecoupError):  # noqa: N818
    """The operators took more than the limit times what they take once."""


class Simulator:
    """One run under a budget. Tensors and storages are numbers, in the order in which they were made.

    >>> from recoup.online.heuristics import make
    >>> run = Simulator(budget=2, heuristic=make("lru"))
    >>> x = run.constant(0)
    >>> [a] = run.call([x], [1], cost=1)
    >>> [b] = run.call([a], [1], cost=1)
    >>> [c] = run.call([b], [1], cost=1)
    >>> [d] = run.call([a, c], [1], cost=1)
    Traceback (most recent call last):
        ...
    recoup.online.simulator.OutOfMemory: 1 more bytes do not fit in 2: 2 are in use, and nothing can be evicted
    """

    def __init__(
        self,
        budget: int | None,
        heuristic: Heuristic,
        deallocation: Deallocation = "eager",
        limit: float | None = None,
    ) -> None:
        self.budget = budget
        self.heuristic = heuristic
        self.deallocation = deallocation
        self.limit = limit
        self.storages = Storages()
        heuristic.watch(self.storages)
        self.clock: float = 1
        self.memory = 0
        self.peak = 0
        self.base_cost: float = 0
        self.remat_cost: float = 0
        self.rematerializations = 0
        self.evictions = 0
        # tensors
        self.storage_of: list[int] = []
        self.op_of: list[int] = []
        self.defined: list[bool] = []
        self.refs: list[int] = []
        # operators
        self.inputs: list[tuple[int, ...]] = []
        self.outputs: list[tuple[int, ...]] = []
        self.cost: list[float] = []
        self.needs: list[int] = []
        """Bytes that must be free for an operator to run: its outputs, and its workspace."""
        self.ran: list[int] = []
        """Every run of an operator, in order: the schedule."""
        # storages, beside what heuristics see
        self.tensors: list[list[int]] = []
        self.locks: list[int] = []
        self.pinned: list[bool] = []
        self.uses: list[int] = []
        self.banished: list[bool] = []
        self._to_banish: set[int] = set()

    # what a program does

    def constant(self, size: int) -> int:
        """An input or a parameter: resident, never evicted."""
        [tensor] = self._declare((), [size], [None], 0)
        self._make_room(size)
        self._appear(self.storage_of[tensor])
        self.peak = max(self.peak, self.memory)
        self.defined[tensor] = True
        self.pinned[self.storage_of[tensor]] = True
        return tensor

    def call(
        self,
        inputs: Sequence[int],
        sizes: Sequence[int],
        cost: float,
        aliases: Sequence[int | None] | None = None,
        workspace: int = 0,
    ) -> list[int]:
        """Run a new operator; ``aliases`` says of which tensor's storage each output is a view, None for a new one.

        ``workspace`` bytes must be free beside its outputs whenever it runs.
        """
        tensors = self._declare(tuple(inputs), sizes, aliases or [None] * len(sizes), cost, workspace)
        self.base_cost += cost
        self._perform(len(self.cost) - 1, None)
        return tensors

    def retain(self, tensor: int) -> None:
        """The program holds one more reference."""
        self.refs[tensor] += 1
        self.uses[self.storage_of[tensor]] += 1

    def release(self, tensor: int) -> None:
        """The program holds one reference less; with the last one its storage may go."""
        storage = self.storage_of[tensor]
        self.refs[tensor] -= 1
        self.uses[storage] -= 1
        if self.uses[storage] == 0:
            if self.deallocation == "eager":
                if self._evictable(storage):
                    self._evict(storage)
            elif self.deallocation == "banish":
                self._banish(storage)

    def keep(self, tensor: int) -> None:
        """Never evict the tensor's storage."""
        self._pin(self.storage_of[tensor])

    def finish(self) -> None:
        """Bring back what the program still holds, and keep it."""
        for tensor in range(len(self.refs)):
            if self.refs[tensor] > 0:
                self._bring_back(tensor)
                self._pin(self.storage_of[tensor])

    def storage_size(self, tensor: int) -> int:
        """Bytes of the storage that the tensor looks at."""
        return self.storages.size[self.storage_of[tensor]]

    @property
    def total_cost(self) -> float:
        """Everything that was computed, first runs and repeats."""
        return self.clock - 1

    # storages come and go

    def _declare(
        self,
        inputs: tuple[int, ...],
        sizes: Sequence[int],
        aliases: Sequence[int | None],
        cost: float,
        workspace: int = 0,
    ) -> list[int]:
        op, needs = len(self.cost), workspace
        storage_of = self.storage_of
        reads = {storage_of[one] for one in inputs}
        tensors: list[int] = []
        made: list[int] = []
        for size, alias in zip(sizes, aliases, strict=True):
            tensor = len(self.refs)
            if alias is None:
                storage = self._new_storage(size, cost, reads)
                needs += size
            else:
                storage = storage_of[alias]
                more = 0 if storage in made else cost  # an operator counts once
                if self.storages.grow(storage, more, reads - {storage}):
                    self.heuristic.rewired(storage)
            self.tensors[storage].append(tensor)
            storage_of.append(storage)
            self.op_of.append(op)
            self.defined.append(False)
            self.refs.append(1)
            self.uses[storage] += 1
            self.heuristic.declared(storage)
            tensors.append(tensor)
            made.append(storage)
        self.inputs.append(inputs)
        self.outputs.append(tuple(tensors))
        self.cost.append(cost)
        self.needs.append(needs)
        return tensors

    def _new_storage(self, size: int, cost: float, reads: set[int]) -> int:
        self.tensors.append([])
        self.locks.append(0)
        self.pinned.append(False)
        self.uses.append(0)
        self.banished.append(False)
        return self.storages.add(size, cost, reads)

    def _evictable(self, storage: int) -> bool:
        return self.storages.resident[storage] and self.locks[storage] == 0 and not self.pinned[storage]

    def _is_whole(self, storage: int) -> bool:
        """Whether all its views are there; one that is not may be made again, though the storage is there."""
        return all(map(self.defined.__getitem__, self.tensors[storage]))

    def _evict(self, storage: int) -> None:
        self.evictions += 1
        self._disappear(storage)
        self.heuristic.evicted(storage)

    def _disappear(self, storage: int) -> None:
        for tensor in self.tensors[storage]:
            self.defined[tensor] = False
        self.storages.pool.pop(storage, None)
        self.storages.resident[storage] = False
        self.memory -= self.storages.size[storage]

    def _appear(self, storage: int) -> None:
        self.storages.resident[storage] = True
        self.memory += self.storages.size[storage]

    def _make_room(self, size: int) -> None:
        while self.budget is not None and self.memory + size > self.budget:
            victim = self.heuristic.victim(self.clock)
            if victim is None:
                raise OutOfMemory(
                    f"{size} more bytes do not fit in {self.budget}: {self.memory} are in use, "
                    "and nothing can be evicted"
                )
            self._evict(victim)

    def _lock(self, storage: int) -> None:
        self.locks[storage] += 1
        self.storages.pool.pop(storage, None)

    def _join_pool(self, storage: int) -> None:
        """Add to the pool, as its newest, what may be evicted and is not there yet."""
        if self._evictable(storage):
            self.storages.pool[storage] = None

    def _pin(self, storage: int) -> None:
        self.pinned[storage] = True
        self.storages.pool.pop(storage, None)

    def _banish(self, storage: int) -> None:
        """Remove a storage for good, once all of its dependents are there; they cannot be made again after that."""
        dependents = self.storages.dependents[storage]
        if not all(self.banished[other] or self._is_whole(other) for other in dependents):
            self._to_banish.add(storage)
            return
        self._to_banish.discard(storage)
        if self.storages.resident[storage]:
            self._disappear(storage)
        for other in dependents:
            if not self.banished[other]:
                self._pin(other)
        self.banished[storage] = True
        self.heuristic.banished(storage)

    # operators run

    def _perform(self, op: int, asked: int | None) -> None:
        """Run an operator, for the first time or to bring ``asked`` back, with all that it needs. No recursion."""
        stack = [(op, asked, self._begin(op))]
        while stack:
            op, asked, missing = stack[-1]
            if not missing:
                self._run(op, asked)
                stack.pop()
            elif self.defined[missing[-1]]:
                self._lock(self.storage_of[missing.pop()])
            else:
                tensor = missing[-1]
                below = self.op_of[tensor]
                stack.append((below, tensor, self._begin(below)))

    def _begin(self, op: int) -> list[int]:
        """Touch what the operator reads and lock what is there; the rest is returned, what comes back first last."""
        last_access, clock = self.storages.last_access, self.clock
        missing = []
        for tensor in self.inputs[op]:
            storage = self.storage_of[tensor]
            last_access[storage] = clock
            if self.defined[tensor]:
                self._lock(storage)
            else:
                missing.append(tensor)
        missing.reverse()
        return missing

    def _run(self, op: int, asked: int | None) -> None:
        """Run an operator whose inputs are there and locked."""
        first, cost, needs = asked is None, self.cost[op], self.needs[op]
        self._make_room(needs)
        self.peak = max(self.peak, self.memory + needs)
        self.clock += cost
        self.ran.append(op)
        if not first:
            self.rematerializations += 1
            self.remat_cost += cost
        if self.limit is not None and self.base_cost and self.clock - 1 > self.limit * self.base_cost:
            raise Thrashing(f"the operators took more than {self.limit:g} times what they take once")
        for storage in self._define(self.outputs[op], asked):
            self._join_pool(storage)
        for tensor in self.inputs[op]:
            storage = self.storage_of[tensor]
            self.locks[storage] -= 1
            self._join_pool(storage)
        if self._to_banish and not first:
            for storage in sorted(self._to_banish):
                self._banish(storage)

    def _define(self, outputs: tuple[int, ...], asked: int | None) -> list[int]:
        """What an operator made is there; the storages that were not there before, that of ``asked`` last."""
        joining = []
        for tensor in outputs:
            storage = self.storage_of[tensor]
            if self.defined[tensor] or self.banished[storage]:  # a double, freed at once
                continue
            self.defined[tensor] = True
            if not self.storages.resident[storage]:
                self._appear(storage)
                joining.append(storage)
                if asked is not None:
                    self.heuristic.returned(storage)
            if asked is None:
                self.storages.last_access[storage] = self.clock
        if asked is not None and self.storage_of[asked] in joining:
            joining.remove(self.storage_of[asked])
            joining.append(self.storage_of[asked])
        return joining

    def _bring_back(self, tensor: int) -> None:
        if not self.defined[tensor]:
            self._perform(self.op_of[tensor], tensor)
