"""DTR for live programs: under ``recoup.dtr(budget)`` every operator passes here, and memory stays within the budget.

Before an operator runs, its inputs are brought back and room is made for what it will allocate; afterwards its outputs
may be evicted, because the call can be repeated. Tensors stay the program's own: views, saved tensors and in-place
operators keep PyTorch's meaning.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from recoup.errors import BudgetError, SettingError
from recoup.online import native
from recoup.online.adapter import (
    OperatorMode,
    default_generator,
    describe,
    has_own_operators,
    pick_device,
    storage_of,
)
from recoup.online.arguments import Arguments
from recoup.online.calls import Call, RandomState, flat_tensors
from recoup.online.contents import Content
from recoup.online.exposed import exposing_methods
from recoup.online.heuristics import make
from recoup.online.journal import Journal
from recoup.online.keeper import Keeper
from recoup.online.learned import TIMED_RUNS, Learned, Lessons
from recoup.online.learner import Learner
from recoup.online.metadata import Heuristic
from recoup.online.operators import Traits, read_traits, written_tensors
from recoup.online.report import Report
from recoup.online.writing import Ran
from recoup.torch.memory import automatic_budget
from recoup.units import Budget, resolve_budget

_open: set[torch.device] = set()
_LOOK_EVERY = 64  # operators between two looks at the allocator's own count
_ATTEMPTS = 4  # at an operator that runs out of memory, each with twice the room
_ATTEMPT = 200  # of the budget: half the room of the first one


def dtr(
    budget: Budget,
    *,
    device: torch.device | str | None = None,
    heuristic: str = "dtr-eq",
    limit: float | None = 3.0,
    learn: bool = True,
    small: float = 0.0,
    sample: bool = False,
) -> Runtime:
    """Train any PyTorch program inside ``budget`` bytes: tensors are evicted when memory runs short and computed again
    when touched, to the same bits. No plan, no capture; any control flow::

        with recoup.dtr("6GiB") as run:
            for x, y in batches:
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        print(run.report)

    The budget counts everything that PyTorch has allocated on the device; it is bytes or ``"auto"``. The device is CUDA
    where there is one. What exists before the block (parameters, inputs) is never evicted; what the program still holds
    is brought back at its end. ``heuristic`` is one of those of ``recoup dtr``. A warning comes when operators take
    more than ``limit`` times what they take once. A program that repeats the same operators is planned in the
    background, and then follows the plan as long as it goes on repeating them; ``learn=False`` never does.

    With thousands of tensors, choosing takes time: ``small=0.01`` ignores those below that share of the average size,
    ``sample=True`` looks at a sample of about the square root of all.
    """
    if limit is not None and not limit >= 1:
        raise SettingError(f"limit={limit!r}: a multiple of what operators take once, 1 or more; None never warns")
    chooses = partial(make, heuristic, small=small, sample=sample)
    return Runtime(budget, pick_device(device), chooses, limit, learn)


class Runtime(OperatorMode):
    """One ``with recoup.dtr(...)`` block."""

    def __init__(
        self,
        budget: Budget,
        device: torch.device,
        heuristic: Callable[[], Heuristic],
        limit: float | None,
        learn: bool,
    ) -> None:
        super().__init__()
        self.report = Report(_bytes_of(budget, device))
        self._device = device
        self._keeper = Keeper(device, heuristic, self.report, limit)
        self._lessons = Lessons(device, self.report)
        self._learner = Learner(self._keeper) if learn else None
        self._sees_in_cpp = device.type == "cuda"
        self._journal: Journal | None = None
        self._traits: dict[Any, Traits] = {}
        self._calls = 0
        self._around = ExitStack()

    def __enter__(self) -> Runtime:
        if self._device in _open:
            raise SettingError(f"there is a block with a budget for {self._device} around this one already")
        with ExitStack() as around:  # closed at once if anything here fails
            self._keeper.open()
            around.callback(self._keeper.close)
            _open.add(self._device)
            around.callback(_open.discard, self._device)
            if self._learner is not None:
                around.callback(self._learner.stop)
            around.enter_context(exposing_methods(self._keeper.give_out))
            # a compiled graph would read a tensor's bytes without asking
            around.enter_context(torch.compiler.set_stance("force_eager"))
            self._see(around)
            self._around = around.pop_all()
        return self

    def __exit__(self, *problem: Any) -> None:
        self._around.close()
        self._lessons.close()
        self.report.close()

    def _see(self, around: ExitStack) -> None:
        """See all operators: those that C++ does not deal with, or all."""
        cpp = native.load() if self._sees_in_cpp else None
        if cpp is None or cpp.is_watching():
            super().__enter__()
            around.callback(super().__exit__, None, None, None)
            return
        count = None if self._device.type == "cuda" else self._keeper.allocated
        watch = cpp.Watch(self, self._device, self.report.budget_bytes, count)
        self._journal = Journal(watch, self._keeper, self._learner)
        around.callback(self._journal.stop)
        self._journal.start()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operator of the program."""
        journal = self._journal
        if types and any(map(has_own_operators, types)):  # what they are made of comes here one by one
            if journal is not None:
                journal.disown()
            return NotImplemented
        if journal is None:
            return self._run(func, args, kwargs)
        journal.enter()
        try:
            return self._run(func, args, kwargs)
        finally:
            journal.leave()

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        begin = time.perf_counter()
        journal = self._journal
        keeper, report = self._keeper, self.report
        lasting = False
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = read_traits(func, self._device)
            if journal is not None:
                journal.describe(traits)
        if traits.looks and keeper.is_there(args[0]):  # a view of what is evicted would be out of its bounds
            return func(*args, **kwargs) if kwargs else func(*args)
        learner = self._learner
        if learner is not None and learner.familiar and not traits.looks:
            passing = learner.passes(func, args, kwargs or {}, traits)
            if passing is not None:
                if journal is not None and journal.wonders:
                    self._acquaint(journal, passing, func, args, kwargs or {})
                keeper.clock += passing.seconds
                report.base_seconds += passing.seconds
                try:
                    return func(*args, **kwargs) if kwargs else func(*args)
                except torch.OutOfMemoryError:
                    if traits.writes or traits.random:
                        raise
                    learner.lose()
        kwargs = kwargs or {}
        if journal is not None and (traits.writes or traits.moves_storage):
            journal.read()
        read = Arguments(func, args, kwargs, keeper)
        contents = read.contents
        statistics = traits.statistics(args) if traits.training_flag else []
        for tensor in () if traits.backward else statistics:
            self._give_up(tensor)
        known = self._lessons.find(tuple(read.key), func, args, kwargs, read.tensors)
        if learner is not None and traits.looks:  # whether views come this way depends on what is evicted
            learner.ahead()
            learner = None
        if learner is not None:
            learner.before(known, func, args, traits)
        self._calls += 1
        if self._calls % _LOOK_EVERY == 0:
            keeper.look()
        need = known.size + known.workspace
        while True:
            if traits.writes:
                written, lasting = self._before_writing(traits, args, kwargs)
            else:
                written = {}
            away = False
            for content in contents:
                if content is not None:
                    keeper.touch(content)
                    away = away or not content.resident
            if away:
                keeper.bring_back(contents)
            if keeper.memory + need > report.budget_bytes:
                self._make_room(known, contents, describe(func))
            if not any(content.fixed for content in written):
                break  # else something that it was made from went meanwhile
        if traits.moves_storage:
            return self._run_moving(func, args, kwargs, contents)
        state = RandomState(kwargs.get("generator") or default_generator(self._device)) if traits.random else None
        start = time.perf_counter()
        once = bool(traits.writes) or traits.random
        try:
            teaches = known.runs < TIMED_RUNS
            result = self._lessons.run(known, func, args, kwargs, not once) if teaches else func(*args, **kwargs)
        except torch.OutOfMemoryError:  # the allocator's memory is in pieces, or a workspace is larger than ever before
            if once:
                raise
            result = self._run_with_more(known, func, args, kwargs, contents)
        end = time.perf_counter()
        made = (result,) if isinstance(result, torch.Tensor) else flat_tensors((result,), [])
        fresh = keeper.register.new_storages(made)
        call = None
        begun: list[Content] = []
        over: list[tuple[Content, Content]] = []
        evictable = all(storage.resizable() for storage in fresh)  # else they are another library's
        if journal is not None and evictable:
            journal.teach(known, describe(func))
        if fresh or written:
            if traits.repeatable and evictable and not lasting:
                call = read.call(func, statistics, state, known)
            if call is None and fresh:
                report.keep(describe(func))
            if call is not None and journal is not None:
                journal.made()
            begun, over = self._note(call, fresh, written)
            known.size = max(known.size, sum(content.size for content in begun))
            if known.workspace:
                report.reached(keeper.memory + known.workspace)
        if learner is not None:
            learner.after(Ran(describe(func), known, contents, begun, over, call is None))
        if lasting and traits.resizes:  # an ``out=`` that was too small is larger now
            for tensor in written_tensors(traits, args, kwargs):
                keeper.measure(tensor)
        keeper.clock += known.seconds
        report.base_seconds += known.seconds
        report.bookkeeping_seconds += (start - begin) + (time.perf_counter() - end)
        return result

    def _acquaint(
        self, journal: Journal, passing: Learned, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """C++ never saw an operator that passes, but perhaps one that is alike."""
        read = Arguments(func, args, kwargs, self._keeper)
        known = self._lessons.find(tuple(read.key), func, args, kwargs, read.tensors)
        if known.alike == passing.alike:
            known.runs, known.seconds = passing.runs, passing.seconds
            journal.teach(known, describe(func))

    def _make_room(self, known: Learned, contents: Sequence[Content | None], name: str) -> None:
        """For an operator; what it will work in is a guess before its first run, and may be too much."""
        try:
            self._keeper.make_room_beside(contents, known.size + known.workspace, name)
        except BudgetError as problem:
            if known.runs > 0:
                raise
            try:
                self._keeper.make_room_beside(contents, known.size, name)
            except BudgetError:
                raise problem from None

    def _run_with_more(
        self,
        known: Learned,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        contents: Sequence[Content | None],
    ) -> Any:
        """An operator for which there was no memory: make more and more room, and at last let it have what it wants."""
        more = max(known.size + known.workspace, self.report.budget_bytes // _ATTEMPT)
        for _ in range(_ATTEMPTS):
            more *= 2
            try:
                self._keeper.make_room_beside(contents, more, describe(func))
                torch.cuda.empty_cache()
                return self._lessons.run(known, func, args, kwargs, limited=True)
            except (torch.OutOfMemoryError, BudgetError):
                continue
        torch.cuda.empty_cache()
        return self._lessons.run(known, func, args, kwargs, limited=False)

    def _note(
        self, call: Call | None, fresh: Sequence[torch.UntypedStorage], written: dict[Content, torch.Tensor]
    ) -> tuple[list[Content], list[tuple[Content, Content]]]:
        """What an operator made, and what it wrote to and can make again."""
        keeper = self._keeper
        begun = [keeper.register.begin(storage, call, keeper.bytes_of(storage)) for storage in fresh]
        over = [(old, keeper.register.begin(storage_of(tensor), call)) for old, tensor in written.items()]
        if call is not None:
            call.outputs = [weakref.ref(content) for content in begun] + [weakref.ref(new) for _, new in over]
            for old, _ in over:
                call.writes.append(call.reads.index(old))
                call.written += old.size
        for content in begun:
            keeper.count(content)
        for old, new in over:
            keeper.supersede(old, new)
        if keeper.memory > self.report.budget_bytes:
            keeper.make_room_beside([*begun, *(new for _, new in over)], 0, "what an operator returned")
        return begun, over

    def _before_writing(
        self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[Content, torch.Tensor], bool]:
        """The contents that will be written over and can be made again; else they are given up, and the call cannot be
        repeated, because it would write again. Running statistics of a batch norm are no reason."""
        over: dict[Content, torch.Tensor] = {}
        lasting = not traits.repeatable
        if traits.training_flag:
            return over, lasting
        for tensor in written_tensors(traits, args, kwargs):
            content = self._keeper.content_of(tensor)
            if content is not None:
                lasting = lasting or content.fixed or (tensor.is_leaf and tensor.requires_grad)
                over[content] = tensor
        if not lasting:
            return over, False
        for tensor in over.values():
            self._give_up(tensor)
        return {}, True

    def _give_up(self, tensor: torch.Tensor) -> None:
        """The tensor's content changes for good: a parameter, a buffer."""
        content = self._keeper.content_of(tensor)
        if content is not None:
            self._keeper.before_loss(content)

    def _run_moving(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], contents: Sequence[Content | None]
    ) -> Any:
        """Operators that give a tensor another storage or size: nothing they touch is evicted any more."""
        for content in contents:
            if content is not None:
                self._keeper.before_loss(content)
        result = func(*args, **kwargs)
        for tensor in flat_tensors((result,), []):
            self._keeper.measure(tensor)
        return result


def _bytes_of(budget: Budget, device: torch.device) -> int:
    if budget == "auto":
        return automatic_budget(device)
    size = resolve_budget(budget, 0, "write bytes with a unit, as in 6GiB, 500MB or 123B, or 'auto'")
    if not size:
        raise BudgetError(
            f"{budget!r}: without a plan no plain peak is known to take a part of; give bytes, as in 6GiB"
        )
    return size
