"""What is away and will be made again, and what is there only for the sake of that.

A content that is away is *needed* if the program can reach it, or if it is read by the call of one that is needed. What
came back for the sake of others, and is needed by none of them any more, is *spare*: the first thing to evict, and not
a matter of scores. The paper has no such notion: there, what came back stays until its score is the lowest.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from recoup.online.contents import Content


class Needs:
    """Counts the needers of every content: those that are away, needed, and made from it."""

    def __init__(self) -> None:
        self._spare: list[weakref.ref[Content]] = []
        self.changed: list[int] = []
        """The numbers of those that came, went, or are away and began or ceased to be needed."""

    def gone(self, content: Content) -> None:
        """Its bytes are gone."""
        self.changed.append(content.number)
        if content.needed:
            self._count(content, 1)

    def back(self, content: Content) -> None:
        """Its bytes are there again."""
        self.changed.append(content.number)
        if content.needed:
            self._count(content, -1)
        self._check(content)

    def let_go(self, content: Content) -> None:
        """The program cannot reach it any more, and it is away."""
        if not content.needers:
            self.changed.append(content.number)
            self._count(content, -1)

    def given_up(self, content: Content) -> None:
        """It is about to lose its call."""
        if not content.resident and content.needed:
            self._count(content, -1)

    def spare(self, offers: Callable[[Content], bool]) -> Content | None:
        """Something spare that may be evicted now."""
        left: list[weakref.ref[Content]] = []
        found = None
        while self._spare and found is None:
            reference = self._spare.pop()
            content = reference()
            if content is None or not content.resident or content.needed:
                continue
            if offers(content):
                found = content
            else:
                left.append(reference)  # it is being read
        self._spare += left
        return found

    def _count(self, content: Content, change: int) -> None:
        """``content`` began or ceased to need its parents; through those that are away, that goes on and on."""
        stack = [content]
        released = []  # when all is counted, not before: what dies then comes back here
        while stack:
            call = stack.pop().call
            if call is None:
                continue
            for parent in call.parents:
                before = parent.needers
                parent.needers += change
                if parent.resident:
                    self._check(parent)
                elif not parent.held and (before == 0 or parent.needers == 0):
                    self.changed.append(parent.number)
                    released.append(parent.keeps)
                    parent.keeps = parent.fixed_storages() if parent.needers else ()
                    stack.append(parent)

    def _check(self, content: Content) -> None:
        if content.own is not None and not content.needers:
            self._spare.append(weakref.ref(content))
