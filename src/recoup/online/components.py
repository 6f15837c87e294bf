"""The relaxed evicted neighbourhood (Appendix C.2): evicted components, kept by union-find, whose cost is one number.

A component knows its border, all that has ever been next to it: what may cost something else when the component does.
"""

from __future__ import annotations

from recoup.online.around import Around
from recoup.online.metadata import Storages


class Classes(Around):
    """With the evicted components it touches; what comes back leaves phantom connections behind."""

    def watch(self, storages: Storages) -> None:
        """Begin a run."""
        super().watch(storages)
        self._node: dict[int, int] = {}
        """Of each storage that was ever evicted, the place in the forest that it got at the last time."""
        self._parent: list[int] = []
        self._total: dict[int, float] = {}
        self._border: dict[int, set[int]] = {}

    def seen(self, changed: set[int]) -> set[int]:
        """All that is next to their components."""
        nodes = [self._node[storage] for storage in changed if storage in self._node]
        return set().union(*(self._border[root] for root in set(map(self._find, nodes))))

    def around(self, storage: int) -> float:
        """The cost of the components next to it."""
        return sum(map(self._total.__getitem__, self._touched(storage)))

    def evicted(self, storage: int) -> None:
        """It joins the components next to it."""
        super().evicted(storage)
        if storage in self._node:  # what saw it in its old place may see it no more
            self._stale |= self._border[self._find(self._node[storage])]
        root = self._node[storage] = len(self._parent)
        self._parent.append(root)
        self._total[root] = self.storages.cost[storage]
        self._border[root] = set()
        self._meet(root, storage)
        for other in self._touched(storage):
            root = self._union(root, self._find(other))

    def returned(self, storage: int) -> None:
        """Its component loses its cost, but keeps its connections."""
        super().returned(storage)
        if storage in self._node:
            root = self._find(self._node[storage])
            self._total[root] -= self.storages.cost[storage]
            self._meet(root, storage)

    def rewired(self, storage: int) -> None:
        """It is on the border of the components next to it now."""
        super().rewired(storage)
        for root in self._touched(storage):
            self._border[root].add(storage)

    def _touched(self, storage: int) -> set[int]:
        """The roots of the components next to a storage."""
        resident, nodes, find = self.storages.resident, self._node, self._find
        near = self.storages.dependencies[storage] | self.storages.dependents[storage]
        return {find(nodes[other]) for other in near if not resident[other] and other in nodes}

    def _find(self, node: int) -> int:
        parent = self._parent
        root = node
        while parent[root] != root:
            root = parent[root]
            self.accesses += 1
        while parent[node] != root:
            parent[node], node = root, parent[node]
        return root

    def _meet(self, root: int, storage: int) -> None:
        """The neighbours of a storage are on the border of its component."""
        self._border[root] |= self.storages.dependencies[storage]
        self._border[root] |= self.storages.dependents[storage]

    def _union(self, a: int, b: int) -> int:
        """One component of two, under the root of the one that has the longer border."""
        if a == b:
            return a
        if len(self._border[a]) < len(self._border[b]):
            a, b = b, a
        self._parent[b] = a
        self._total[a] += self._total.pop(b)
        self._border[a] |= self._border.pop(b)
        return a
