"""What ran without Python, and how the keeper learns of it.

Where the C++ part is built (:mod:`recoup.online.native`), it sees every operator first. What it knows it lets run,
after Python has made room if need be, and writes down what was made from what. Nobody reads that until memory runs
short, or something is to be written over: then the records of what is still there, or needed to make that again, become
contents and calls like all others. Many results are gone before anyone has read of them.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from recoup.online.calls import Call
from recoup.online.contents import Content
from recoup.online.keeper import Keeper
from recoup.online.learned import TIMED_RUNS, Learned
from recoup.online.learner import Learner
from recoup.online.operators import Traits

_AT_ONCE = 192  # records to read if any must be: less is soon not enough, and to choose from few costs more than that


def _nothing() -> None:
    """In place of a reference to what stays for good."""


def _is_lost(content: Content) -> bool:
    """Whether its bytes may be other ones when they are needed again, or none."""
    return content.exposed or (content.fixed and not content.resident)


Place = tuple[int, torch.UntypedStorage | None, int]
"""A storage's key, the storage if it is still there, and its bytes."""


class Journal:
    """Between the watch, which sees operators, and the keeper, which must know of them."""

    def __init__(self, watch: Any, keeper: Keeper, learner: Learner | None) -> None:
        self._watch = watch
        self._keeper = keeper
        self._learner = learner
        self._kinds: dict[int, tuple[Learned, str]] = {}
        self._reading = False
        self._died: dict[int, Content] = {}
        """Contents whose storages died while a record that nobody has read needs them, by their keys."""

    def start(self) -> None:
        """See all operators of this thread, and of backward passes that it begins."""
        self._keeper.unread = self
        self._keeper.losses.told = self._settle
        self._keeper.allocated = self._watch.allocated
        if self._learner is not None:
            self._learner.guard = self._watch
        self._watch.preparing = self._prepare
        self._watch.turning = self._turn
        self._watch.start()
        self.leave()

    def stop(self) -> None:
        """See none."""
        self._watch.stop()
        self.enter()
        self.read()

    # around an operator that comes to Python

    def enter(self) -> None:
        """Learn what matters of those that did not."""
        watch, keeper, learner = self._watch, self._keeper, self._learner
        obeyed, over = watch.obeys, watch.over
        seconds = watch.take_seconds()
        keeper.clock += seconds
        keeper.report.base_seconds += seconds
        evictions, *repeated = watch.take_done()
        keeper.report.evictions += evictions
        keeper.repeated(*repeated)
        if learner is not None and learner.familiar:
            learner.passed(watch.at, over)
            if obeyed and not over:
                learner.interrupt(watch.strays, watch.wonders)
            if obeyed:
                self.read()
        elif learner is not None and watch.watches:
            learner.saw(*watch.take_seen())
        if watch.journals:
            keeper.look()
        if watch.overwrote:
            self.skim(0)

    def leave(self) -> None:
        """What those that come next should know."""
        watch, keeper, learner = self._watch, self._keeper, self._learner
        watch.clock = keeper.clock
        watch.away = keeper.away
        alone = learner is None or learner.lost
        if watch.journals and not alone:
            self.read()  # from here on the learner wants to know of every operator
        watch.journals = alone
        watch.watches = alone and learner is not None
        if learner is not None:
            watch.at = learner.at

    @property
    def wonders(self) -> bool:
        """Whether Python was called because the operator is not known on such arguments."""
        return bool(self._watch.wonders)

    def describe(self, traits: Traits) -> None:
        """How the operator behaves that Python was called for."""
        self._watch.describe(traits.looks, traits.simple, traits.training_flag, traits.sized_by_floats)

    def teach(self, known: Learned, name: str) -> None:
        """What it takes; it may run without Python from now on."""
        if known.runs >= TIMED_RUNS:
            self._kinds[known.number] = known, name
            self._watch.teach(known.number, known.alike, known.size + known.workspace, known.seconds)

    def made(self) -> None:
        """What the operator made can be made again."""
        self._watch.made()

    def disown(self) -> None:
        """What comes next is not what Python was called for."""
        self._watch.disown()

    def _prepare(self, storages: list[torch.UntypedStorage], number: int, size: int) -> None:
        """An operator that C++ knows reads these, and some are away, or there is no room for what it makes."""
        begin = time.perf_counter()
        keeper = self._keeper
        self.enter()
        try:
            contents = list(map(keeper.register.find_in, storages))
            for content in contents:
                if content is not None:
                    keeper.touch(content)
            keeper.bring_back(contents)
            keeper.make_room_beside(contents, size, self._kinds[number][1])
        finally:
            self.leave()
            keeper.report.bookkeeping_seconds += time.perf_counter() - begin

    def _turn(self, alone: bool) -> None:
        """The next operator is the first one of a step that has a plan; ``alone``: it was followed to the end."""
        begin = time.perf_counter()
        self.enter()
        try:
            self.read()
            if self._learner is not None:
                self._learner.turn(alone)
        finally:
            self.leave()
            self._keeper.report.bookkeeping_seconds += time.perf_counter() - begin

    # what the keeper asks

    def needs(self, content: Content) -> bool:
        """Whether a record that was not read needs it."""
        if not self._watch.mourn(content.key) and not self._reading:
            return False
        self._died[content.key] = content
        return True

    def read(self) -> bool:
        """Make contents and calls of what was written down; whether there was anything."""
        return self._read(all_of_it=True, size=0)

    def skim(self, size: int) -> None:
        """Only of ``size`` bytes and more that were made first, if any, and of what was written over."""
        self._read(all_of_it=False, size=size)

    def _read(self, all_of_it: bool, size: int) -> bool:
        keeper = self._keeper
        learner = self._learner
        if self._watch.obeys and learner is not None:
            learner.passed(self._watch.at, over=False)
            learner.interrupt(strays=False, wonders=False)
        news: bool = self._watch.has_news()
        if self._reading or not (self._died or news):
            return False
        collects = gc.isenabled()
        gc.disable()  # what dies meanwhile would be there only by name
        self._reading = True
        gone: list[Content] = []
        passing: Iterable[tuple[int, bool]] = ()
        try:
            fixed, records, passing, touched, _kept = self._watch.take(all_of_it, size, _AT_ONCE)
            for key, storage in fixed:  # what it was made from has changed
                content = self._died.get(key) if storage is None else keeper.register.find_in(storage)
                if content is not None:
                    keeper.losses.fix(content)
                    if not content.resident:
                        keeper.losses.forsake(content)
            made: dict[int, Content] = {}
            for record, number, views, outputs, writes, at in records:
                known, name = self._kinds[number]
                reads = [self._content(made, *place) for place in views]
                contents = [content for content in reads if content is not None]
                call = None
                if len(contents) == len(reads) and not any(map(_is_lost, contents)):
                    call = Call(name, record.again, contents, known)
                old = None if writes < 0 else reads[writes]
                if old is not None and old.fixed:
                    call = None
                results = [None if place is None else self._begin(place, call, old) for place in outputs]
                begun = [content for content in results if content is not None]
                if call is not None:
                    call.outputs = [_nothing if content is None else weakref.ref(content) for content in results]
                    if old is not None:
                        call.writes, call.written = [call.reads.index(old)], old.size
                made.update((content.key, content) for content in begun)
                if learner is not None and at >= 0:
                    learner.knew(at, results)
            gone = [content for content in made.values() if not content.held]
            for content in made.values():
                if content.held and not content.memory().nbytes():
                    keeper.found_away(content)
            for storage, clock in touched:
                content = None if storage is None else keeper.register.find_in(storage)
                if content is not None:
                    keeper.touch(content, clock)
        finally:
            self._reading = False
            self._died = {key: content for key, content in self._died.items() if self._watch.mourn(key)}
            for content in gone:
                keeper.losses.lament(content, self.needs(content))
            for number, soon in passing:
                self._kinds[number][0].passing = soon
            if collects:
                gc.enable()
        return news

    def _content(
        self,
        made: dict[int, Content],
        key: int,
        storage: torch.UntypedStorage | None,
        _: int,
    ) -> Content | None:
        """What a record read, if that can be said: what came from outside, and is gone, nobody knew."""
        content = made.get(key)
        if content is None and storage is None:
            return self._died.get(key)
        if content is None and storage is not None:
            content = self._keeper.register.find_in(storage)
            if content is None:
                content = self._keeper.meet(storage)
        return content

    def _begin(self, place: Place, call: Call | None, old: Content | None) -> Content:
        """What a call made; ``old`` is what it wrote over, if it did."""
        key, storage, size = place
        keeper = self._keeper
        register = keeper.register
        content = register.begin_without(key, size, call) if storage is None else register.begin(storage, call, size)
        if old is None:
            keeper.add(content)
        else:
            if old.fixed:
                keeper.losses.forsake(old)
            keeper.supersede(old, content)
        if call is None:
            self._settle(content)
        return content

    def _settle(self, content: Content) -> None:
        """It can never be made again, and so may be written to without Python."""
        if content.held:
            self._watch.settle(content.key)
