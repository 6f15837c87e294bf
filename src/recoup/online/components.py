"""The relaxed evicted neighbourhood (Appendix C.2): evicted components, kept by union-find, whose cost is one number.

A component knows who counts on its cost: the storages whose remembered sums have it in them.
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
        """Of each storage that was ever evicted, a node of the component that it joined at the last time."""
        self._parent: list[int] = []
        self._rank: list[int] = []
        self._total: dict[int, float] = {}
        self._counting: dict[int, set[int]] = {}

    def around(self, storage: int) -> float:
        """The cost of the components next to it, which are counted on from now on."""
        total: float = 0
        for root in self._touched(storage):
            total += self._total[root]
            self._counting[root].add(storage)
        return total

    def evicted(self, storage: int) -> None:
        """It joins the components next to it."""
        self._stir(storage)
        touched = self._touched(storage)
        root = touched.pop() if touched else self._begin()
        for other in touched:
            root = self._union(root, other)
        self._node[storage] = root
        self._total[root] += self.storages.cost[storage]
        self._spoil(root)

    def returned(self, storage: int) -> None:
        """Its component loses its cost, but keeps its connections."""
        self._stale.add(storage)
        root = self._stir(storage)
        if root is not None:
            self._total[root] -= self.storages.cost[storage]

    def rewired(self, storage: int) -> None:
        """It may be next to other components now, and others to its own."""
        self._stir(storage)
        self._stale.add(storage)

    def banished(self, storage: int) -> None:
        """What is next to it may touch its component now."""
        self._stir(storage)

    def _stir(self, storage: int) -> int | None:
        """What is next to it, or counts on its component, must be summed again; the component, if it has one."""
        self._stale |= self.storages.dependencies[storage]
        self._stale |= self.storages.dependents[storage]
        if storage not in self._node:
            return None
        root = self._find(self._node[storage])
        self._spoil(root)
        return root

    def _spoil(self, root: int) -> None:
        """The cost of a component changes."""
        counting = self._counting[root]
        self._stale |= counting
        counting.clear()

    def _touched(self, storage: int) -> set[int]:
        """The roots of the components next to a storage."""
        storages, nodes, parent = self.storages, self._node, self._parent
        found = set()
        for near in (storages.dependencies[storage], storages.dependents[storage]):
            for other in near:
                if not storages.resident[other] and other in nodes:
                    root = parent[nodes[other]]
                    found.add(root if parent[root] == root else self._find(root))
        return found

    def _find(self, node: int) -> int:
        parent = self._parent
        root = node
        while parent[root] != root:
            root = parent[root]
            self.accesses += 1
        while parent[node] != root:
            parent[node], node = root, parent[node]
        return root

    def _begin(self) -> int:
        """A new component."""
        root = len(self._parent)
        self._parent.append(root)
        self._rank.append(0)
        self._total[root] = 0
        self._counting[root] = set()
        return root

    def _union(self, a: int, b: int) -> int:
        """One component of two."""
        if self._rank[a] < self._rank[b]:
            a, b = b, a
        self._rank[a] += self._rank[a] == self._rank[b]
        self._parent[b] = a
        self._total[a] += self._total.pop(b)
        self._stale |= self._counting.pop(b)
        return a
