"""DTR for live programs: under ``recoup.dtr(budget)`` every operator passes here, and memory stays within the budget.

A tensor stays the program's own: evicting it empties its storage, bringing it back fills the storage again, so views,
saved tensors and in-place operators keep PyTorch's meaning. Before an operator runs, its inputs are brought back and
room is made for what it will allocate; afterwards its outputs may be evicted, because the call can be repeated.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from recoup.errors import BudgetError
from recoup.online.adapter import CAN_EXCHANGE, TorchDispatchMode, below_autograd, exchange, fresh_view, storage_of
from recoup.online.contents import Call, Content, Holder, View, flat_tensors
from recoup.online.exposed import exposing_methods
from recoup.online.heuristics import make
from recoup.online.learned import Learned, Lessons
from recoup.online.metadata import Storages
from recoup.online.operators import differs_each_time, statistics_of, traits
from recoup.online.report import Report
from recoup.torch.memory import allocated_size, automatic_budget, live_tensors, resident_bytes
from recoup.units import Budget, format_bytes, resolve_budget

_HOLDER = "_recoup_holder"
_SMALL = 16  # elements: arguments of another device up to this size are copied into the call
_COMPACT = 4096  # numbers given out beyond twice the living ones before they are given anew
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SYNC_EVERY = 64  # operators between two looks at the allocator's own count, on CUDA


class Scratch:
    """In place of running statistics when a batch norm is repeated: it writes to them and does not read them."""

    __slots__ = ("dtype", "shape")

    def __init__(self, like: torch.Tensor) -> None:
        self.shape, self.dtype = like.shape, like.dtype


class Runtime(TorchDispatchMode):
    """One ``with recoup.dtr(...)`` block."""

    def __init__(self, budget: Budget, device: torch.device, heuristic: str, limit: float | None) -> None:
        super().__init__()
        self.device = device
        self.report = Report(_bytes_of(budget, device))
        self._budget = self.report.budget_bytes
        self._name = heuristic
        self._limit = limit
        self._lessons = Lessons(device, self._rounded)
        self._open = False
        self._around = ExitStack()
        self._memory = 0
        self._wanted = 0  # what the program would hold if nothing were evicted
        self._clock = 1.0
        self._calls = 0
        self._begin_numbering([])

    # the block

    def __enter__(self) -> Runtime:
        for tensor in live_tensors():
            if self._is_managed(tensor):
                self._adopt(storage_of(tensor))
        self._memory = self._wanted = self.report.peak_bytes = resident_bytes(self.device)
        if self._memory > self._budget:
            raise BudgetError(
                f"{format_bytes(self._memory)} are allocated already, more than the budget of "
                f"{format_bytes(self._budget)}"
            )
        self._open = True
        self._around.enter_context(exposing_methods(self._touch))
        # a compiled graph would not ask before it reads
        self._around.enter_context(torch.compiler.set_stance("force_eager"))
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self._around.close()
        try:
            with below_autograd():
                self._bring_back_all()
        finally:
            self._open = False
            self._numbers = []
            self.report.close()

    def _bring_back_all(self) -> None:
        """What the program still holds must be readable after the block."""
        for content in self._living():
            if content.held and not content.resident:
                self._bring_back(content)
            if content.held:
                self._fix(content)

    # operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        begin = time.perf_counter()
        kwargs = kwargs or {}
        tensors = flat_tensors(args, [])
        if kwargs:
            flat_tensors(tuple(kwargs.values()), tensors)
        about = traits(func)
        contents = [self._content(tensor) for tensor in tensors]
        self._calls += 1
        if self._calls % _SYNC_EVERY == 0 and self.device.type == "cuda":
            self._memory = resident_bytes(self.device)
        for content in contents:
            if content is not None:
                self._storages.last_access[content.number] = self._clock
                if not content.resident:
                    self._bring_back_inputs(contents)
                    break
        if about.moves_storage:
            return self._run_moving(func, args, kwargs, contents)
        known = self._lessons.find(func, args, kwargs, tensors)
        if self._memory + known.size + known.workspace > self._budget:
            self._make_room_for(func, contents, known)
        statistics = [args[place] for place in statistics_of(func, args) if args[place] is not None]
        written = _written(about.writes, args, kwargs)
        if written or statistics:
            self._before_writing(written, statistics)
        state = _random_state(self.device, kwargs) if about.random else None
        start = time.perf_counter()
        result = self._lessons.run(known, func, args, kwargs)
        self._after(func, args, kwargs, tensors, contents, result, written, statistics, state, known, about.replayable)
        end = time.perf_counter()
        cost = known.seconds
        self._clock += cost
        self.report.base_seconds += cost
        self.report.bookkeeping_seconds += (start - begin) + max(0.0, end - start - cost)
        return result

    def _run_moving(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], contents: Sequence[Content | None]
    ) -> Any:
        """Operators that give a tensor another storage or size: nothing they touch is evicted any more."""
        for content in contents:
            if content is not None:
                self._before_loss(content)
                self._fix(content)
        result = func(*args, **kwargs)
        for tensor in flat_tensors([result], []):
            content = self._content(tensor)
            if content is not None and (size := self._rounded(storage_of(tensor).nbytes())) != content.size:
                self._count(size - content.size)
                content.size = size
        return result

    def _after(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        contents: Sequence[Content | None],
        result: Any,
        written: Sequence[torch.Tensor],
        statistics: Sequence[torch.Tensor],
        state: Any,
        known: Learned,
        replayable: bool,
    ) -> None:
        """Note what the operator made and what it wrote to."""
        fresh = self._new_storages(result)
        over = {content: tensor for tensor in written if (content := self._content(tensor)) is not None}
        if not fresh and not over and not statistics:
            return
        ignored = {id(tensor) for tensor in statistics}
        call = None
        if not replayable or differs_each_time(func, self.device.type):
            self.report.keep(str(func))
        elif not any(content.fixed and id(tensor) not in ignored for content, tensor in over.items()):
            call = self._remember(func, args, kwargs, tensors, contents, ignored, state, known)
        made = [self._begin(storage, call) for storage in fresh]
        for content in made:
            self._count(content.size)
        for old, tensor in over.items():
            if id(tensor) not in ignored:
                made.append(self._begin(storage_of(tensor), call))
                if call is not None:
                    call.writes.append(next(i for i, view in enumerate(call.views) if view.content is old))
                    call.size += old.size
        for tensor in statistics:
            old_content = self._content(tensor)
            if old_content is not None:
                over[old_content] = tensor
                self._number(self._begin(storage_of(tensor), None))
        for old in over:
            self._supersede(old)
        if call is not None:
            call.outputs = [weakref.ref(content) for content in made]
        for content in made:
            self._number(content)
        self.report.peak_bytes = max(self.report.peak_bytes, self._memory + known.workspace)

    def _begin(self, storage: torch.UntypedStorage, call: Call | None) -> Content:
        """A new content in a storage, in place of the one that it had."""
        content = Content(self._rounded(storage.nbytes()), storage, call, self._forgotten)
        holder = _holder(storage)
        if holder is not None and holder.runtime is self:
            holder.content = content
        else:
            setattr(storage, _HOLDER, Holder(content, self))
        return content

    def _before_writing(self, written: Sequence[torch.Tensor], statistics: Sequence[torch.Tensor]) -> None:
        for tensor in (*written, *statistics):
            content = self._content(tensor)
            if content is not None and (
                content.fixed or _is_trained(tensor) or any(tensor is one for one in statistics)
            ):
                self._before_loss(content)
                self._fix(content)

    def _remember(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        contents: Sequence[Content | None],
        ignored: set[int],
        state: Any,
        known: Learned,
    ) -> Call | None:
        """The call, to be run again; None if something that it read cannot be kept."""
        replaced: list[Any] = []
        views: list[View] = []
        for tensor, content in zip(tensors, contents, strict=True):
            if id(tensor) in ignored:
                replaced.append(Scratch(tensor))
            elif content is None or tensor.is_conj() or tensor.is_neg():
                if tensor.numel() > _SMALL or content is not None:
                    return None
                replaced.append(tensor.detach().clone())
            else:
                view = View(content, tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride()))
                replaced.append(view)
                views.append(view)
        each = iter(replaced)
        again = _swap(args, each)
        names = dict(zip(kwargs, _swap(tuple(kwargs.values()), each), strict=True)) if kwargs else {}
        return Call(func, again, names, views, [], state, [], known.seconds, known.size, known.workspace)

    # contents and their storages

    def _is_managed(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type and tensor.layout == torch.strided and _is_plain(tensor)

    def _content(self, tensor: torch.Tensor) -> Content | None:
        """What the tensor's storage holds; None for another device's, or what is no plain tensor."""
        if not self._is_managed(tensor):
            return None
        storage = storage_of(tensor)
        holder: Holder | None = storage.__dict__.get(_HOLDER)
        if holder is None or holder.runtime is not self:
            content = self._adopt(storage)
            self._count(content.size)
            return content
        return holder.content

    def _adopt(self, storage: torch.UntypedStorage) -> Content:
        """A storage from outside: never evicted."""
        content = self._begin(storage, None)
        self._number(content)
        return content

    def _new_storages(self, result: Any) -> list[torch.UntypedStorage]:
        """Storages in the result that nobody knew."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in flat_tensors([result], []):
            if self._is_managed(tensor):
                storage = storage_of(tensor)
                holder = _holder(storage)
                if holder is None or holder.runtime is not self:
                    found[storage._cdata] = storage
        return list(found.values())

    def _rounded(self, size: int) -> int:
        return allocated_size(size, self.device)

    def _count(self, size: int) -> None:
        self._memory += size
        self._wanted += size
        self.report.wanted_bytes = max(self.report.wanted_bytes, self._wanted)
        self.report.peak_bytes = max(self.report.peak_bytes, self._memory)

    def _forgotten(self, content: Content) -> None:
        """Nothing will ever need a content that was brought back for others: its bytes are free."""
        if self._open and content.resident:
            self._memory -= content.size
            self._storages.leave_pool(content.number)

    def storage_died(self, content: Content) -> None:
        """The program let go of a storage: its bytes are free."""
        if not self._open:
            return
        content.held = False
        content.storage = None
        self._wanted -= content.size
        if content.resident:
            self._memory -= content.size
            self._lose_bytes(content)
            if content.fixed:
                self._fix_dependents(content)

    def _supersede(self, old: Content) -> None:
        """Something was written over a content: its storage has another one now."""
        old.held = False
        old.storage = None
        self._lose_bytes(old)
        if old.fixed:
            self._fix_dependents(old)

    def _lose_bytes(self, content: Content) -> None:
        self._storages.leave_pool(content.number)
        self._storages.resident[content.number] = False
        content.leave()
        self._heuristic.evicted(content.number)

    # eviction

    def _make_room_for(self, func: Any, contents: Sequence[Content | None], known: Learned) -> None:
        locked = [content for content in contents if content is not None]
        for content in locked:
            self._lock(content)
        try:
            self._make_room(known.size + known.workspace, str(func))
        finally:
            for content in locked:
                self._unlock(content)

    def _make_room(self, size: int, what: str) -> None:
        """Evict until ``size`` more bytes fit."""
        if self._memory + size <= self._budget:
            return
        if self.device.type == "cuda":
            self._memory = resident_bytes(self.device)
        start = time.perf_counter()
        while self._memory + size > self._budget:
            number = self._heuristic.victim(self._clock)
            if number is None:
                self.report.search_seconds += time.perf_counter() - start
                raise BudgetError(self._out_of_memory(size, what))
            victim = self._numbers[number]()
            if victim is None:
                self._storages.leave_pool(number)
            else:
                self._evict(victim)
        self.report.search_seconds += time.perf_counter() - start

    def _evict(self, content: Content) -> None:
        storage = content.memory()
        self._lose_bytes(content)
        storage.resize_(0)
        self._memory -= content.size
        self.report.evictions += 1

    def _out_of_memory(self, size: int, what: str) -> str:
        living = self._living()
        fixed = sum(content.size for content in living if content.resident and content.fixed)
        locked = sum(content.size for content in living if content.resident and content.locks and not content.fixed)
        return (
            f"{what} needs {format_bytes(size)} more, and {format_bytes(self._memory)} of the budget of "
            f"{format_bytes(self._budget)} are in use: {format_bytes(fixed)} cannot be made again (parameters, inputs, "
            f"gradients), {format_bytes(locked)} are inputs of operators that are running; "
            f"{format_bytes(self._memory + size)} would be enough here"
        )

    def _lock(self, content: Content) -> None:
        content.locks += 1
        self._storages.leave_pool(content.number)

    def _unlock(self, content: Content) -> None:
        content.locks -= 1
        self._offer(content)

    def _offer(self, content: Content) -> None:
        """Into the pool, if it may be evicted."""
        if content.resident and not content.fixed and content.locks == 0 and content.size:
            self._storages.join_pool(content.number)

    # rematerialisation

    def _bring_back_inputs(self, contents: Sequence[Content | None]) -> None:
        inputs = [content for content in contents if content is not None]
        locked: list[Content] = []
        try:
            for content in inputs:
                if content.resident:
                    self._lock(content)
                    locked.append(content)
            for content in inputs:
                if content not in locked:
                    self._bring_back(content)
                    self._lock(content)
                    locked.append(content)
        finally:
            for content in locked:
                self._unlock(content)

    def _bring_back(self, wanted: Content) -> None:
        """Run the call that made a content again, with all that it needs first. No recursion."""
        if wanted.resident:
            return
        frames = [self._frame(wanted)]
        try:
            while frames:
                call, locked, missing = frames[-1]
                if missing:
                    content = missing[-1]
                    if content.resident:
                        missing.pop()
                        self._lock(content)
                        locked.append(content)
                    else:
                        frames.append(self._frame(content))
                    continue
                self._repeat(call)
                for content in frames.pop()[1]:
                    self._unlock(content)
        finally:
            for _, locked, _ in frames:
                for content in locked:
                    self._unlock(content)

    def _frame(self, content: Content) -> tuple[Call, list[Content], list[Content]]:
        call = content.call
        assert call is not None, "what is away can be made again"
        parents = list(dict.fromkeys(view.content for view in call.views))
        for parent in parents:
            self._storages.last_access[parent.number] = self._clock
        locked = [parent for parent in parents if parent.resident]
        for parent in locked:
            self._lock(parent)
        return call, locked, [parent for parent in reversed(parents) if not parent.resident]

    def _repeat(self, call: Call) -> None:
        """Run a call again; what it makes and is away comes back, the rest is dropped."""
        doubled = 0 if CAN_EXCHANGE else call.size
        self._make_room(call.size + doubled + call.workspace, f"repeating {call.func}")
        self.report.peak_bytes = max(self.report.peak_bytes, self._memory + call.size + doubled + call.workspace)
        sources = [view.content.memory() for view in call.views]
        for index in call.writes:
            sources[index] = self._private(call.views[index].content)
        each = iter(
            [fresh_view(storage, view.dtype, view.geometry) for view, storage in zip(call.views, sources, strict=True)]
        )
        args = self._arguments(call.args, each)
        kwargs = dict(zip(call.kwargs, self._arguments(tuple(call.kwargs.values()), each), strict=True))
        result = _replay(call.func, args, kwargs, call.random_state, self.device)
        fresh = self._fresh_storages(result, sources) + [sources[index] for index in call.writes]
        for reference, storage in zip(call.outputs, fresh, strict=True):
            content = reference()
            if content is not None and not content.resident:
                self._return(content, storage)
        self._clock += call.cost
        self.report.rematerializations += 1
        self.report.remat_seconds += call.cost
        self.report.check(self._limit)

    def _private(self, content: Content) -> torch.UntypedStorage:
        """Bytes of a content that a repeated call may write over: its own if nobody else waits for them."""
        storage = content.memory()
        if content.own is None or content.locks > 1:
            copied = torch.UntypedStorage(storage.nbytes(), device=storage.device)
            return copied.copy_(storage)
        self._memory -= content.size
        self._lose_bytes(content)
        return storage

    def _arguments(self, values: Sequence[Any], views: Any) -> tuple[Any, ...]:
        return tuple(
            next(views)
            if isinstance(value, View)
            else torch.zeros(value.shape, dtype=value.dtype, device=self.device)
            if isinstance(value, Scratch)
            else type(value)(self._arguments(value, views))
            if isinstance(value, list | tuple)
            else value
            for value in values
        )

    def _fresh_storages(self, result: Any, sources: Iterable[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        given = {storage._cdata for storage in sources}
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in flat_tensors([result], []):
            storage = storage_of(tensor)
            if tensor.device.type == self.device.type and storage._cdata not in given:
                found[storage._cdata] = storage
        return list(found.values())

    def _return(self, content: Content, storage: torch.UntypedStorage) -> None:
        target = None if content.storage is None else content.storage()
        if target is None:
            content.own = storage
        else:
            exchange(target, storage)
        content.come_back()
        self._memory += content.size
        self._storages.resident[content.number] = True
        self._heuristic.returned(content.number)
        self._offer(content)

    # what can never be made again

    def _before_loss(self, content: Content) -> None:
        """A fixed content is about to be overwritten: bring back all that would have been made from it again."""
        seen: set[int] = set()
        stack = [content]
        away: list[Content] = []
        while stack:
            for dependent in self._dependents(stack.pop()):
                if not dependent.resident and dependent.number not in seen:
                    seen.add(dependent.number)
                    stack.append(dependent)
                    if dependent.held:
                        away.append(dependent)
        for dependent in away:
            self._bring_back(dependent)
            self._fix(dependent)

    def _fix_dependents(self, content: Content) -> None:
        """The bytes of a content that cannot be made again are gone: neither can anything made from it."""
        stack = [content]
        while stack:
            for dependent in self._dependents(stack.pop()):
                if dependent.call is not None:
                    self._fix(dependent)
                    if not dependent.resident:
                        stack.append(dependent)

    def _fix(self, content: Content) -> None:
        """From now on it cannot be made again; what is away and will be made from it must keep it alive."""
        content.call = None
        content.keeps = []
        self._storages.leave_pool(content.number)
        if content.resident:
            for dependent in self._dependents(content):
                if not dependent.resident:
                    dependent.keeps.append(content.memory())

    def _dependents(self, content: Content) -> list[Content]:
        numbers = self._storages.dependents[content.number]
        return [other for number in list(numbers) if (other := self._numbers[number]()) is not None]

    def _touch(self, tensor: torch.Tensor, lasting: bool) -> None:
        """The program takes a tensor's bytes past the dispatcher."""
        if not self._open or not self._is_managed(tensor):
            return
        content = self._content(tensor)
        if content is not None:
            with below_autograd():
                self._bring_back(content)
            if lasting:
                self._fix(content)

    # numbers for the heuristic

    def _begin_numbering(self, contents: Sequence[Content]) -> None:
        self._storages = Storages()
        self._heuristic = make(self._name)
        self._heuristic.watch(self._storages)
        self._numbers: list[weakref.ref[Content]] = []
        for content in contents:
            content.number = -1
        for content in contents:
            self._number(content)
        self._compact_at = 2 * len(contents) + _COMPACT

    def _number(self, content: Content) -> None:
        if len(self._numbers) >= getattr(self, "_compact_at", _COMPACT):
            self._begin_numbering([other for other in self._living() if other is not content])
        number = self._storages.add(content.size)
        content.number = number
        self._numbers.append(weakref.ref(content))
        self._storages.resident[number] = content.resident
        self._storages.last_access[number] = self._clock
        if content.call is not None:
            reads = {view.content.number for view in content.call.views} - {-1}
            self._storages.grow(number, content.call.cost, reads)
            if content.resident:
                self._offer(content)
            else:
                self._heuristic.evicted(number)

    def _living(self) -> list[Content]:
        return [content for reference in self._numbers if (content := reference()) is not None]


def dtr(
    budget: Budget, *, device: torch.device | str | None = None, heuristic: str = "dtr-eq", limit: float | None = 3.0
) -> Runtime:
    """Train any PyTorch program inside ``budget`` bytes: tensors are evicted when memory runs short and computed again
    when touched, exactly. No plan, no capture; any control flow::

        with recoup.dtr("6GiB") as run:
            for x, y in batches:
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        print(run.report)

    The budget counts everything that PyTorch has allocated on the device; it is bytes or ``"auto"``. The device is CUDA
    where there is one. What exists before the block (parameters, inputs) is never evicted. A warning comes when
    operators take more than ``limit`` times what they take once.
    """
    place = torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Runtime(budget, place, heuristic, limit)


def _bytes_of(budget: Budget, device: torch.device) -> int:
    if budget == "auto":
        return automatic_budget(device)
    size = resolve_budget(budget, 0)
    if not size:
        raise BudgetError(
            f"{budget!r}: without a plan there is no plain peak to take a part of; give bytes, as in 6GiB"
        )
    return size


def _holder(storage: torch.UntypedStorage) -> Holder | None:
    return storage.__dict__.get(_HOLDER)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN


def _written(writes: Sequence[int | str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for place in writes:
        value = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
        flat_tensors([value], found)
    return found


def _swap(values: Sequence[Any], replaced: Any) -> tuple[Any, ...]:
    return tuple(
        next(replaced)
        if isinstance(value, torch.Tensor)
        else type(value)(_swap(value, replaced))
        if isinstance(value, list | tuple)
        else value
        for value in values
    )


def _is_trained(tensor: torch.Tensor) -> bool:
    return tensor.is_leaf and tensor.requires_grad


def _random_state(device: torch.device, kwargs: dict[str, Any]) -> Any:
    generator = kwargs.get("generator") or _default_generator(device)
    return generator, bytes(generator.get_state().numpy())  # not a tensor: it counts for no device


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or torch.cuda.current_device()]
    return torch.default_generator


def _replay(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: Any, device: torch.device) -> Any:
    if state is None:
        return func(*args, **kwargs)
    generator, before = state
    now = generator.get_state()
    generator.set_state(torch.frombuffer(bytearray(before), dtype=torch.uint8))
    try:
        return func(*args, **kwargs)
    finally:
        generator.set_state(now)
