"""What a storage holds between two writes to it: the unit of eviction.

An operator that writes in place ends one content and begins another in the same storage; so contents never change, and
each can be made again from those that its call read. A content is *resident* while its bytes are somewhere, and *held*
while the program can still reach them. One that no call can make again (a parameter, an input) is *fixed*: it cannot be
evicted, and writing to it changes it. If the bytes of a fixed content go for good, all that was made from it and is
resident becomes fixed in turn (the paper's banishing, Appendix C.4).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from recoup.online.calls import Call


class Owner(Protocol):
    """Who looks after contents."""

    def storage_died(self, content: Content) -> None:
        """The program cannot reach the content's storage any more."""

    def content_died(self, content: Content) -> None:
        """Nothing needs the content any more, and its bytes were its own."""


class Content:
    """See the module. ``number`` is its place in the arrays that heuristics look at."""

    # what most never change is said once, here
    number = -1
    resident = True
    locks = 0
    needers = 0
    """How many that are away will be made from it again."""
    mark = -1
    """Which value of a step it is, if a learner wants to know; each gets a higher one."""
    exposed = False
    """Whether something outside PyTorch can write to it, so that nothing made from it can be made again."""
    own: torch.UntypedStorage | None = None
    """Where the bytes are when no tensor of the program can reach them any more."""
    keeps: Sequence[torch.UntypedStorage] = ()
    """Fixed storages that it will be made from again: they must not die while it is away."""

    def __init__(
        self, size: int, key: int, storage: torch.UntypedStorage | None, call: Call | None, owner: Owner
    ) -> None:
        self.size = size
        self.key = key
        """The storage's, as long as it lives."""
        self.storage: weakref.ref[torch.UntypedStorage] | None = None if storage is None else weakref.ref(storage)
        """Where the program reaches it; None once it cannot."""
        self.call = call
        self.owner = owner

    def __del__(self) -> None:
        if self.own is not None:
            self.owner.content_died(self)

    @property
    def held(self) -> bool:
        """Whether the program can reach it."""
        return self.storage is not None

    @property
    def needed(self) -> bool:
        """Whether it will be made again, or would be if it were away."""
        return self.storage is not None or self.needers > 0

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
        self.keeps = self.fixed_storages()

    def fixed_storages(self) -> Sequence[torch.UntypedStorage]:
        """Those that it will be made from, as far as they cannot be made again themselves."""
        if self.call is None:
            return ()
        return [content.memory() for content in self.call.reads if content.call is None and content.resident]

    def come_back(self) -> None:
        """Its bytes are there again."""
        self.resident = True
        self.keeps = ()


class Holder:
    """Sits on a storage and tells when the storage dies; it names the storage's current content."""

    __slots__ = ("content", "owner")

    def __init__(self, content: Content, owner: Owner) -> None:
        self.content = content
        self.owner = owner

    def __del__(self) -> None:
        self.owner.storage_died(self.content)
