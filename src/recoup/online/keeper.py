"""Memory under a budget: which contents are resident, which one goes next, and how one comes back.

Evicting a content empties its storage, bringing it back fills the same storage again; every tensor over it stays valid.
The choice is a heuristic's of the paper, over the same arrays that the simulator uses.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import torch

from recoup.errors import BudgetError, RecoupWarning
from recoup.online.adapter import below_autograd, can_exchange, exchange, storage_of
from recoup.online.calls import Call, fresh_storages
from recoup.online.collector import Collector
from recoup.online.contents import Content
from recoup.online.losses import Losses
from recoup.online.metadata import Heuristic
from recoup.online.pool import Pool
from recoup.online.register import Register
from recoup.online.report import Report
from recoup.online.waiting import Waiting
from recoup.torch.memory import live_tensors, resident_bytes
from recoup.units import format_bytes

_CHOICE = 4  # bytes to choose from, for each that goes


class Unread(Protocol):
    """Operators that ran without a keeper's knowledge: see :mod:`recoup.online.journal`."""

    def read(self) -> bool:
        """Tell the keeper of what they made; whether there was anything to tell."""

    def skim(self, size: int) -> None:
        """Tell it of ``size`` bytes that were made first: the rest may be gone before anything of it must go."""

    def needs(self, content: Content) -> bool:
        """Whether one of them read it, whose bytes are gone."""


class Keeper:
    """Looks after every content on one device."""

    def __init__(
        self, device: torch.device, heuristic: Callable[[], Heuristic], report: Report, limit: float | None
    ) -> None:
        self.device = device
        self.register = Register(device, self)
        self.report = report
        self.memory = 0
        self.clock = 1.0
        self.can_look = device.type == "cuda"
        """Whether the allocator counts for itself."""
        self.allocated: Callable[[], int] = partial(resident_bytes, device)
        """What it counts."""
        self.unread: Unread | None = None
        """What ran without us."""
        self._limit = limit
        self._budget = report.budget_bytes
        self.chosen = 0
        """How many evictions were for want of room."""
        self.shortage = 0
        """The most bytes that were wanting then, since the learner last asked."""
        self.away = 0
        """What the program holds and is evicted."""
        self.on_release: Callable[[Content], None] | None = None
        """Told when the program lets go of a content."""
        self._pool = Pool(heuristic)
        self.losses = Losses(self._pool)
        self._collector = Collector()
        self._waiting = Waiting(self._pool)
        self._choice = 0
        """Bytes that were offered to choose from, less ``_CHOICE`` for each that went."""
        self._open = False

    def open(self) -> None:
        """Count what is there; none of it will be evicted."""
        self._collector.begin()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what the allocator keeps for later would go past a limit on it
            torch.cuda.reset_peak_memory_stats(self.device)
        for storage in self.register.new_storages(live_tensors()):
            self.meet(storage)
        self.memory = sum(content.size for content in self._pool.living())
        self.look()
        self.report.reached(self.memory, self.wanted)
        if self.memory > self._budget:
            self._collector.end()
            raise BudgetError(
                f"{format_bytes(self.memory)} are allocated already, more than the budget of "
                f"{format_bytes(self._budget)}"
            )
        self._open = True

    def close(self) -> None:
        """Bring back what the program still holds, so that it can be read from now on without asking."""
        budget = self._budget
        try:
            with below_autograd():
                while not self._bring_back_held():
                    self._budget += max(1, budget // 8)  # an empty storage would crash whoever reads it
        finally:
            self._open = False
            self._budget = budget
            self._collector.end()
        if self.device.type == "cuda":
            self.report.reached(torch.cuda.max_memory_allocated(self.device))
        if self.memory > budget:
            warnings.warn(
                f"what the program holds at the end of the block takes {format_bytes(self.memory)}, more than the "
                f"budget of {format_bytes(budget)}",
                RecoupWarning,
                stacklevel=6,  # the end of the block, past the stack of what is undone there
            )

    def _bring_back_held(self) -> bool:
        """Whether there was room for it."""
        try:
            for content in self._pool.living():
                if content.held and not content.locks:
                    self.bring_back([content])
                    self._pool.lock(content)
        except BudgetError:
            return False
        return True

    # contents

    @property
    def wanted(self) -> int:
        """What the program would hold if nothing were evicted."""
        return self.memory + self.away

    def content_of(self, tensor: torch.Tensor) -> Content | None:
        """What the tensor's storage holds; None for another device's, or what is no plain tensor."""
        content = self.register.find(tensor)
        if content is None:
            self._catch_up()
            content = self.register.find(tensor)
        if content is not None or not self.register.is_managed(tensor):
            return content
        content = self.meet(storage_of(tensor))
        if not self.can_look:
            self._count(content)
        if self.memory > self._budget:
            with below_autograd():
                self.make_room(0, "a tensor from outside")
        return content

    def meet(self, storage: torch.UntypedStorage) -> Content:
        """What was made behind our back is never evicted."""
        content = self.register.begin(storage, None, self.bytes_of(storage))
        self.add(content)
        return content

    def bytes_of(self, storage: torch.UntypedStorage) -> int:
        """Those that count. What is not the allocator's own, such as another library's memory, is not in its count,
        neither now nor when it goes."""
        return storage.nbytes() if not self.can_look or storage.resizable() else 0

    def is_there(self, tensor: object) -> bool:
        """Whether it is a tensor with its bytes, and counted."""
        if not isinstance(tensor, torch.Tensor):
            return False
        content = self.register.find(tensor)
        return self.can_look if content is None else content.resident

    def matters(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether something depends on what these hold, so that it must be looked after before that changes."""
        found = [content for tensor in tensors if (content := self.register.find(tensor)) is not None]
        return any(not content.fixed or self._pool.has_dependents(content) for content in found)

    def settle(self) -> bool:
        """If all is there, let it stay: from now on operators may run that nobody notes."""
        self._catch_up()
        living = self._pool.living()
        if any(content.held and not content.resident for content in living):
            return False
        for content in living:
            if content.held and not content.fixed:
                self.losses.fix(content)
        return True

    def _catch_up(self) -> bool:
        """Know of everything; whether there was anything new."""
        return self.unread is not None and self.unread.read()

    def add(self, content: Content) -> None:
        """A content that counts already."""
        if self._pool.full:
            self._let_go()
            self._pool.renumber(content)
        self._pool.add(content, self.clock)

    def count(self, content: Content) -> None:
        """A content in a new storage: it takes memory, and may be evicted if its call can be repeated."""
        self._count(content)
        self.add(content)

    def _count(self, content: Content) -> None:
        self.memory += content.size
        self.report.reached(self.memory, self.wanted)

    def measure(self, tensor: torch.Tensor) -> None:
        """The tensor's storage may have been made larger or smaller."""
        content = self.content_of(tensor)
        if content is not None:
            self._resize(content, self.register.size_of(self.bytes_of(storage_of(tensor))))

    def _resize(self, content: Content, size: int) -> None:
        self.memory += size - content.size
        self.report.reached(self.memory, self.wanted)
        content.size = size

    def supersede(self, old: Content, new: Content) -> None:
        """Something was written over a content that can be made again."""
        old.storage = None
        size, new.size = new.size, old.size
        self.losses.lose_bytes(old)
        self._resize(new, size)
        self.add(new)

    def storage_died(self, content: Content) -> None:
        """The program let go of a storage: its bytes are free."""
        if not self._open:
            return
        if self.on_release is not None:
            self.on_release(content)
        content.storage = None
        self._pool.let_go(content)
        if not content.resident:
            self.away -= content.size
            self._pool.needs.let_go(content)
            if self.unread is not None:
                self.unread.needs(content)
            return
        self.memory -= content.size
        content.resident = False
        self.losses.lament(content, self.unread is not None and self.unread.needs(content))

    def content_died(self, content: Content) -> None:
        """Nothing will ever need a content that was brought back for others: its bytes are free."""
        if self._open and content.resident:
            self.memory -= content.size
            self._pool.withdraw(content)

    # eviction

    def make_room_beside(self, contents: Iterable[Content | None], size: int, what: str) -> None:
        """Evict until ``size`` more bytes fit, but none of ``contents``."""
        locked = [content for content in contents if content is not None]
        for content in locked:
            self._pool.lock(content)
        try:
            self.make_room(size, what)
        finally:
            for content in locked:
                self._pool.unlock(content)

    def make_room(self, size: int, what: str) -> None:
        """Evict until ``size`` more bytes fit."""
        if self.memory + size <= self._budget:
            return
        if self.unread is not None:
            self._learn_more(self.unread, self.memory + size - self._budget)
        self.look()
        self.shortage = max(self.shortage, self.memory + size - self._budget)
        start = time.perf_counter()
        tidied = collected = False
        while self.memory + size > self._budget:
            victim = self._pool.victim(self.clock)
            if victim is not None:
                self._evict(victim)
                self.chosen += 1
                self._choice -= _CHOICE * victim.size
            elif self._catch_up():
                continue
            elif not tidied:
                self._let_go()
                self.look()
                tidied = True
            elif self._waiting.let_go():
                continue
            elif not collected:
                self._collector.collect()  # tensors in cycles of Python objects are held by nobody
                collected, tidied = True, False
            else:
                raise BudgetError(self._out_of_memory(size, what))
        self.report.search_seconds += time.perf_counter() - start

    def _learn_more(self, unread: Unread, wanting: int) -> None:
        """Know enough of what was made to choose from: to hear of all of it takes longer than most choices gain."""
        if not self._pool.prefers_old:
            unread.skim(sys.maxsize)
            return
        before = self._pool.bytes
        self._choice = min(max(self._choice, 0), before)
        if self._choice < _CHOICE * wanting:
            unread.skim(_CHOICE * wanting)
            self._choice += self._pool.bytes - before

    def _let_go(self) -> None:
        """What is away and will not be needed for anything that the program holds need not keep anything alive."""
        for content in self._pool.living():
            if content.keeps and not content.needed:
                content.keeps = ()

    def look(self) -> None:
        """Take the allocator's own count, where there is one: it sees what passes no operator."""
        if self.can_look:
            self.memory = self.allocated()

    def evict(self, content: Content) -> None:
        """Evict it by a plan's order, if it may be; a plan counts on what it was made from to go when it may, too."""
        if self._pool.offers(content):
            self._evict(content)
            if not content.needed:
                content.keeps = ()

    def _evict(self, content: Content) -> None:
        storage = content.memory()
        self.losses.lose_bytes(content)
        storage.resize_(0)
        self.memory -= content.size
        if content.held:
            self.away += content.size
        self.report.evictions += 1

    def found_away(self, content: Content) -> None:
        """It was evicted without our knowledge."""
        if content.size:
            self.losses.lose_bytes(content)
            self.away += content.size

    def _out_of_memory(self, size: int, what: str) -> str:
        living = [content for content in self._pool.living() if content.resident]
        fixed = sum(content.size for content in living if content.fixed)
        locked = sum(content.size for content in living if content.locks and not content.fixed)
        return (
            f"{what} needs {format_bytes(size)} more, and {format_bytes(self.memory)} of the budget of "
            f"{format_bytes(self._budget)} are in use: {format_bytes(fixed)} cannot be made again (parameters, inputs, "
            f"gradients), {format_bytes(locked)} are inputs of operators that are running; "
            f"{format_bytes(self.memory + size)} would be enough here"
        )

    # rematerialisation

    def bring_back(self, contents: Iterable[Content | None]) -> None:
        """All of them are resident afterwards, at once.

        The calls that made them run again, with all that they need first. No recursion: chains may be long.
        """
        inputs = list(dict.fromkeys(content for content in contents if content is not None))
        with Waiting(self._pool) as self._waiting:
            self._waiting.push(None, inputs)
            while True:
                missing = self._waiting.missing()
                call = self._waiting.next if missing is None else missing.call
                if missing is not None:
                    assert call is not None, "what is away can be made again"
                    parents = call.parents
                    for parent in parents:
                        self.touch(parent)
                    self._waiting.push(call, parents)
                elif call is not None:
                    self._repeat(call)
                    self._waiting.pop()
                else:
                    return

    def bring_back_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """As far as they are known."""
        contents = list(map(self.register.find, tensors))
        if any(content is not None and not content.resident for content in contents):
            self.bring_back(contents)

    def touch(self, content: Content, clock: float | None = None) -> None:
        """It is being used now, or was last used then."""
        self._pool.touch(content, self.clock if clock is None else clock)

    def _repeat(self, call: Call) -> None:
        """Run a call again; what it makes and is away comes back, the rest is dropped."""
        known = call.known
        writes = [call.reads[index] for index in call.writes]
        copied = sum(content.size for content in writes if not _can_be_written_over(content))
        size = known.size + copied + known.workspace + (0 if can_exchange() else known.size + call.written)
        self.make_room(size, f"repeating {call.name}")
        self.report.reached(self.memory + size)
        sources = [content.memory() for content in call.reads]
        for written in writes:
            private = self._private(written)
            sources = [private if content is written else sources[i] for i, content in enumerate(call.reads)]
        result = call.again(sources)
        made = fresh_storages(result, sources, self.device) + [sources[index] for index in call.writes]
        for reference, storage in zip(call.outputs, made, strict=True):
            content = reference()
            if content is not None and not content.resident:
                self._return(content, storage)
        self.repeated(1, known.seconds)

    def repeated(self, count: int, seconds: float) -> None:
        """So many calls were run again."""
        self.clock += seconds
        self.report.rematerializations += count
        self.report.remat_seconds += seconds
        self.report.check(self._limit)

    def _private(self, content: Content) -> torch.UntypedStorage:
        """Bytes of a content that a repeated call may write over: its own if it can be made again for others."""
        storage = content.memory()
        if not _can_be_written_over(content):
            copied = torch.UntypedStorage(storage.nbytes(), device=storage.device)
            return copied.copy_(storage)
        self.memory -= content.size
        self.losses.lose_bytes(content)
        return storage

    def _return(self, content: Content, storage: torch.UntypedStorage) -> None:
        target = None if content.storage is None else content.storage()
        if target is None:
            content.own = storage
        else:
            exchange(target, storage)
            self.away -= content.size
        content.come_back()
        self.memory += content.size
        self._pool.back(content)

    # what can never be made again

    def before_loss(self, content: Content) -> None:
        """A content is about to be overwritten for good: bring back all that would have been made from it again, and
        give up repeating what was made from it. It is fixed from here on."""
        self._catch_up()
        if content.call is not None:
            self.bring_back([content])
            self.losses.fix(content)
        if not self._pool.has_dependents(content):
            return
        seen: set[int] = set()
        stack = [content]
        away: list[Content] = []
        while stack:
            for dependent in self._pool.dependents(stack.pop()):
                if dependent.resident:
                    self.losses.fix(dependent)  # so that it does not go while others come back
                elif dependent.number not in seen:
                    seen.add(dependent.number)
                    stack.append(dependent)
                    if dependent.held:
                        away.append(dependent)
        for dependent in away:
            self.bring_back([dependent])
            self.losses.fix(dependent)
        self.losses.forsake(content)

    def give_out(self, tensor: torch.Tensor, lasting: bool) -> None:
        """The program takes a tensor's bytes past the dispatcher; if for longer, they can never be evicted again."""
        if tensor.device != self.device:
            return
        self._catch_up()  # someone may have written over what we know
        content = self.content_of(tensor) if self._open else None
        if content is None:
            return
        with below_autograd():
            self.bring_back([content])
            if lasting and not content.fixed:  # else it came from outside, and is as exposed as ever
                content.exposed = True
                self.before_loss(content)


def _can_be_written_over(content: Content) -> bool:
    """Whether nobody else reads its bytes, and it can be made again for those who will."""
    return content.own is not None and content.locks <= 1 and content.call is not None
