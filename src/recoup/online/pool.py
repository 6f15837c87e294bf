"""The contents as a heuristic sees them: numbers in arrays, and the pool of those that may be evicted."""

from __future__ import annotations

import gc
import heapq
import weakref
from collections.abc import Callable, Sequence

from recoup.online.calls import Call
from recoup.online.contents import Content
from recoup.online.metadata import Heuristic, Storages
from recoup.online.needs import Needs

_COMPACT = 4096  # numbers given out beyond twice the living ones before they are given anew
_SOON = 8  # contents that are made in the life of one that is only passing
_INHERITED = 8  # neighbours of one that is part of another: more are no news, all of them cost too much to lose


class Pool:
    """Gives contents their numbers, and tells the heuristic what comes and goes."""

    def __init__(self, heuristic: Callable[[], Heuristic]) -> None:
        self._make = heuristic
        self.needs = Needs()
        self._storages = Storages()
        self._begin([])

    @property
    def full(self) -> bool:
        """Whether it is time to let go of what nobody needs, and to give numbers anew."""
        return len(self._numbers) >= self._compact_at

    @property
    def prefers_old(self) -> bool:
        """Whether what was made first is likely to go first."""
        return self._heuristic.by_staleness

    @property
    def bytes(self) -> int:
        """What could be evicted in all."""
        sizes = self._storages.size
        return sum([sizes[number] for number in self._storages.pool])

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
        storages.resident[number] = True
        storages.last_access[number] = clock
        call = content.call
        if call is not None:
            parents = call.parents
            passing = [storages.cost[one.number] for one in parents if one.call is not None and one.call.known.passing]
            cost = call.known.cost + max(passing, default=0.0)
            storages.grow(number, cost, {parent.number for parent in parents})
            for parent in parents:
                self._readers.setdefault(parent.number, set()).add(number)
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

    def lock(self, content: Content) -> None:
        """It must not be evicted until it is unlocked as often."""
        content.locks += 1
        self.withdraw(content)

    def unlock(self, content: Content) -> None:
        """It may be evicted again, as far as this goes."""
        content.locks -= 1
        self.offer(content)

    def touch(self, content: Content, clock: float) -> None:
        """It is being used now."""
        self._storages.last_access[content.number] = clock

    def gone(self, content: Content) -> None:
        """Its bytes are gone."""
        self.withdraw(content)
        self.needs.gone(content)

    def back(self, content: Content) -> None:
        """Its bytes are there again."""
        self.offer(content)
        self.needs.back(content)

    def victim(self, clock: float) -> Content | None:
        """What to evict now, or None if nothing may be."""
        spare = self.needs.spare(self.offers)
        if spare is not None:
            return spare
        self._tell()
        while (number := self._heuristic.victim(clock)) is not None:
            content = self._numbers[number]()
            if content is not None and content.resident:
                return content
            self._storages.pool.pop(number, None)  # it is gone, or died while it was chosen
        return None

    def _tell(self) -> None:
        """Tell the heuristic what came and went since it last chose; most programs hold and drop much more than is ever
        evicted. To it, evicted is what the program holds and is away. What is away for others' sake is theirs."""
        storages, heuristic = self._storages, self._heuristic
        for number in dict.fromkeys(self.needs.changed):
            content = self._numbers[number]()
            there = content is None or content.resident or not content.held
            if there != storages.resident[number]:
                storages.resident[number] = there
                if there:
                    heuristic.returned(number)
                else:
                    heuristic.evicted(number)
            if content is not None and not content.resident and not content.held and content.call is not None:
                self._bequeath(number)
        self.needs.changed.clear()

    def _bequeath(self, number: int) -> None:
        """A content that only a repetition will ever read is part of what was made from it: that costs as much more,
        and is next to all that it was next to. As a neighbour to everything itself, it would make all that it was
        made from dear, long after anyone could need it."""
        storages = self._storages
        reads = storages.dependencies[number]
        legacy = len(reads), len(storages.dependents[number]), storages.cost[number]
        if self._bequeathed.get(number) == legacy:
            return
        self._bequeathed[number] = legacy
        for heir in self._heirs(number):
            if len(reads) <= _INHERITED and not reads <= storages.dependencies[heir]:
                storages.grow(heir, 0, reads)
                self._heuristic.rewired(heir)
        dearer = [number]  # the oldest first, so that each is passed on once
        while dearer:
            dear = heapq.heappop(dearer)
            for heir, call in self._heirs(dear).items():
                raised = storages.raise_cost(heir, call.known.cost + storages.cost[dear])
                if raised and call.known.passing and heir not in dearer:
                    heapq.heappush(dearer, heir)

    def _heirs(self, number: int) -> dict[int, Call]:
        """What was made from a content and is not evicted, with the calls that made it."""
        found = {}
        for other in self._storages.dependents[number]:
            content = self._numbers[other]()
            if content is not None and content.call is not None and self._storages.resident[other]:
                found[other] = content.call
        return found

    def living(self) -> list[Content]:
        """Every content that something may still need."""
        return [content for reference in self._numbers if (content := reference()) is not None]

    def let_go(self, content: Content) -> None:
        """The program lets go of it: soon after it was made, or late."""
        if content.call is not None:
            content.call.known.passing = self._storages.count - content.number <= _SOON

    def has_dependents(self, content: Content) -> bool:
        """Whether anything was made from it, as far as that matters still."""
        return bool(self._readers.get(content.number))

    def dependents(self, content: Content) -> list[Content]:
        """What was made from it."""
        numbers = list(self._readers.get(content.number, ()))
        return [other for number in numbers if (other := self._numbers[number]()) is not None]

    def forget_dependents(self, content: Content) -> None:
        """Nothing that was made from it will be made from it again."""
        self._readers.pop(content.number, None)
        self._storages.dependents[content.number].clear()

    def _begin(self, contents: Sequence[Content]) -> None:
        """Give numbers anew, to the contents that are left."""
        last = [self._storages.last_access[content.number] for content in contents]
        self._storages = Storages()
        self._heuristic = self._make()
        self._heuristic.watch(self._storages)
        self._numbers: list[weakref.ref[Content]] = []
        self._bequeathed: dict[int, tuple[int, int, float]] = {}
        """How much each left, when it last did."""
        self._readers: dict[int, set[int]] = {}
        """What was made from each: unlike the heuristic's neighbours, by its own call alone."""
        self.needs.changed.clear()
        self._compact_at = 2 * len(contents) + _COMPACT
        for content, access in zip(contents, last, strict=True):
            self.add(content, access)
        for content in contents:
            if not content.resident:
                self.needs.changed.append(content.number)
