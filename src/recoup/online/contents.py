"""What a storage holds between two writes to it, and the call that made it: the units of eviction.

An operator that writes in place ends one content and begins another in the same storage; so contents never change, and
each can be made again from those that its call read. A content is *resident* while its bytes are somewhere, and *held*
while the program can still reach them. One that was never made by a call that can be replayed (a parameter, an input)
is *fixed*: it cannot be evicted. If the bytes of a fixed content go for good, all that was made from it and is resident
becomes fixed in turn (the paper's banishing, Appendix C.4).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(slots=True)
class View:
    """A tensor, as a call remembers it: a content, and how to look at it."""

    content: Content
    dtype: torch.dtype
    geometry: tuple[Any, ...]
    """Offset, size and stride."""


@dataclass(slots=True, weakref_slot=True)
class Call:
    """An operator with its arguments, tensors replaced by views; it can be run again."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    views: list[View]
    writes: list[int]
    """Positions in ``views`` of what it writes to, one for each content."""
    random_state: Any
    """The generator's state before the call, for operators that draw."""
    outputs: list[weakref.ref[Content]]
    """What it made, new storages in order of appearance and then what it wrote to."""
    cost: float
    size: int
    """Bytes of all its new storages and of what it writes to."""
    workspace: int


class Content:
    """See the module. ``number`` is its place in the arrays that heuristics look at."""

    __slots__ = (
        "__weakref__", "call", "forgotten", "held", "keeps", "locks", "number", "own", "resident", "size", "storage",
    )  # fmt: skip

    def __init__(
        self, size: int, storage: torch.UntypedStorage, call: Call | None, forgotten: Callable[[Content], None]
    ) -> None:
        self.size = size
        self.storage: weakref.ref[torch.UntypedStorage] | None = weakref.ref(storage)
        self.forgotten = forgotten
        self.call = call
        self.number = -1
        self.resident = True
        self.held = True
        self.locks = 0
        self.own: torch.UntypedStorage | None = None
        """Where the bytes are when no tensor of the program can reach them any more."""
        self.keeps: list[torch.UntypedStorage] = []
        """Fixed storages that it will be made from again: they must not die while it is away."""

    def __del__(self) -> None:
        if self.own is not None:
            self.forgotten(self)

    @property
    def fixed(self) -> bool:
        """Whether it cannot be made again."""
        return self.call is None

    def memory(self) -> torch.UntypedStorage:
        """The storage that has its bytes now."""
        storage = self.own if self.storage is None else self.storage()
        assert storage is not None, "a resident content has a storage"
        return storage

    def leave(self) -> None:
        """Its bytes go; hold on to the fixed storages that it will be made from."""
        self.resident = False
        self.own = None
        if self.call is not None:
            self.keeps = [
                view.content.memory() for view in self.call.views if view.content.fixed and view.content.resident
            ]

    def come_back(self) -> None:
        """Its bytes are there again."""
        self.resident = True
        self.keeps = []


class Owner(Protocol):
    """Who looks after contents."""

    def storage_died(self, content: Content) -> None:
        """The program cannot reach the content's storage any more."""


class Holder:
    """Sits on a storage and tells when the storage dies; it names the storage's current content."""

    __slots__ = ("content", "runtime")

    def __init__(self, content: Content, runtime: Owner) -> None:
        self.content = content
        self.runtime = runtime

    def __del__(self) -> None:
        self.runtime.storage_died(self.content)


def flat_tensors(values: Sequence[Any], found: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in arguments or results, in order, through lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            flat_tensors(value, found)
    return found
