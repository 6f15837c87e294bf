"""A program with all the memory that it asks for: what it holds by itself, the measure of every budget."""

from __future__ import annotations

from collections.abc import Sequence


class PlainRun:
    """Nothing is evicted; a storage goes with the last reference to it, a constant's too."""

    def __init__(self) -> None:
        self.memory = 0
        self.peak = 0
        self._storage_of: list[int] = []
        self._size: list[int] = []
        self._uses: list[int] = []

    def constant(self, size: int) -> int:
        """An input or a parameter."""
        return self.call((), (size,), 0)[0]

    def call(
        self, inputs: Sequence[int], sizes: Sequence[int], cost: float, aliases: Sequence[int | None] | None = None
    ) -> list[int]:
        """An operator: its outputs are there from now on."""
        first = len(self._storage_of)
        for size, alias in zip(sizes, aliases or [None] * len(sizes), strict=True):
            if alias is None:
                self._storage_of.append(len(self._size))
                self._size.append(size)
                self._uses.append(1)
                self.memory += size
            else:
                storage = self._storage_of[alias]
                self._storage_of.append(storage)
                self._uses[storage] += 1
        self.peak = max(self.peak, self.memory)
        return list(range(first, len(self._storage_of)))

    def retain(self, tensor: int) -> None:
        """One more reference."""
        self._uses[self._storage_of[tensor]] += 1

    def release(self, tensor: int) -> None:
        """One reference less."""
        storage = self._storage_of[tensor]
        self._uses[storage] -= 1
        if self._uses[storage] == 0:
            self.memory -= self._size[storage]

    def storage_size(self, tensor: int) -> int:
        """Bytes of the storage that the tensor looks at."""
        return self._size[self._storage_of[tensor]]

    def finish(self) -> None:
        """What is live stays."""
