"""The contents as a heuristic sees them: numbers in arrays, and the pool of those that may be evicted."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from recoup.online.contents import Content
from recoup.online.metadata import Heuristic, Storages

_COMPACT = 4096  # numbers given out beyond twice the living ones before they are given anew


class Pool:
    """Gives contents their numbers, and tells the heuristic what comes and goes."""

    def __init__(self, heuristic: Callable[[], Heuristic]) -> None:
        self._make = heuristic
        self._storages = Storages()
        self._begin([])

    @property
    def full(self) -> bool:
        """Whether it is time to let go of what nobody needs, and to give numbers anew."""
        return len(self._numbers) >= self._compact_at

    def add(self, content: Content, clock: float) -> None:
        """A new content; it may be evicted if its call can be repeated."""
        storages = self._storages
        number = storages.count
        try:
            storages.add(content.size)
            self._numbers.append(weakref.ref(content))
        except BaseException:  # an interrupt must not leave half a storage behind
            storages.cut(number)
            del self._numbers[number:]
            raise
        content.number = number
        storages.resident[number] = content.resident
        storages.last_access[number] = clock
        call = content.call
        if call is not None:
            storages.grow(number, call.known.seconds, {view.content.number for view in call.views})
            self._heuristic.declared(number)
            self.offer(content)

    def renumber(self, newcomer: Content) -> None:
        """Give numbers anew to all that are left but the newcomer, which has none yet."""
        collects = gc.isenabled()
        gc.disable()  # what dies meanwhile would have a number of before
        try:
            self._begin([content for content in self.living() if content is not newcomer])
        finally:
            if collects:
                gc.enable()

    def offer(self, content: Content) -> None:
        """It may be evicted from now on, if nothing speaks against it."""
        if content.call is not None and content.resident and content.locks == 0 and content.size:
            self._storages.pool.setdefault(content.number)

    def withdraw(self, content: Content) -> None:
        """It must not be evicted."""
        self._storages.pool.pop(content.number, None)

    def offers(self, content: Content) -> bool:
        """Whether it may be evicted now."""
        return content.number in self._storages.pool

    def touch(self, content: Content, clock: float) -> None:
        """It is being used now."""
        self._storages.last_access[content.number] = clock

    def gone(self, content: Content) -> None:
        """Its bytes are gone."""
        self.withdraw(content)
        self._storages.resident[content.number] = False
        self._untold.append(content.number)

    def back(self, content: Content) -> None:
        """Its bytes are there again."""
        self._storages.resident[content.number] = True
        self._untold.append(~content.number)
        self.offer(content)

    def victim(self, clock: float) -> Content | None:
        """What to evict now, or None if nothing may be."""
        while self._untold:
            event = self._untold.popleft()
            if event >= 0:
                self._heuristic.evicted(event)
            else:
                self._heuristic.returned(~event)
        while (number := self._heuristic.victim(clock)) is not None:
            content = self._numbers[number]()
            if content is not None and content.resident:
                return content
            self._storages.pool.pop(number, None)  # it is gone, or died while it was chosen
        return None

    def living(self) -> list[Content]:
        """Every content that something may still need."""
        return [content for reference in self._numbers if (content := reference()) is not None]

    def has_dependents(self, content: Content) -> bool:
        """Whether anything was made from it, as far as that matters still."""
        return bool(self._storages.dependents[content.number])

    def dependents(self, content: Content) -> list[Content]:
        """What was made from it."""
        numbers = list(self._storages.dependents[content.number])
        return [other for number in numbers if (other := self._numbers[number]()) is not None]

    def forget_dependents(self, content: Content) -> None:
        """Nothing that was made from it will be made from it again."""
        self._storages.dependents[content.number].clear()

    def _begin(self, contents: Sequence[Content]) -> None:
        """Give numbers anew, to the contents that are left."""
        last = [self._storages.last_access[content.number] for content in contents]
        self._storages = Storages()
        self._heuristic = self._make()
        self._heuristic.watch(self._storages)
        self._numbers: list[weakref.ref[Content]] = []
        self._untold: deque[int] = deque()
        """What went, and by its complement what came back, since the heuristic last chose; most programs hold and
        drop much more than is ever evicted."""
        self._compact_at = 2 * len(contents) + _COMPACT
        for content, access in zip(contents, last, strict=True):
            self.add(content, access)
        for content in contents:
            if not content.resident:
                self._untold.append(content.number)
