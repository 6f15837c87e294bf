"""A call of an operator, remembered so that it can be run again and gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from recoup.online.adapter import array_of, fresh_view, key_of, storage_of

if TYPE_CHECKING:
    from recoup.online.contents import Content
    from recoup.online.learned import Learned


Geometry = tuple[int, torch.Size, tuple[int, ...]]


class View:
    """A tensor, as a call remembers it: a content, and how to look at it (offset, size and stride)."""

    __slots__ = ("content", "dtype", "geometry")

    def __init__(self, content: Content, dtype: torch.dtype, geometry: Geometry) -> None:
        self.content = content
        self.dtype = dtype
        self.geometry = geometry


class Scratch:
    """In place of running statistics when a batch norm is repeated: it writes to them and does not read them."""

    __slots__ = ("device", "dtype", "shape")

    def __init__(self, like: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device


@dataclass(slots=True, weakref_slot=True)
class Call:
    """An operator, what it read, and how to run it again."""

    name: str
    again: Callable[[Sequence[torch.UntypedStorage]], Any]
    """The result once more, from the bytes of each of ``reads``."""
    reads: list[Content]
    """What each tensor among its arguments looked at."""
    known: Learned
    """What it takes, as far as is known now."""
    writes: list[int] = field(default_factory=list)
    """Positions in ``reads`` of what it writes to, one for each content."""
    written: int = 0
    """Bytes of these."""
    outputs: Sequence[Callable[[], Content | None]] = ()
    """References to what it made: new storages in order of appearance, then what it wrote to."""
    parents: list[Content] = field(init=False)
    """What it reads, each once, in order."""

    def __post_init__(self) -> None:
        self.parents = list(dict.fromkeys(self.reads))


@dataclass(slots=True)
class Repetition:
    """An operator with its arguments, tensors replaced by views and scratch."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    views: list[View]
    state: RandomState | None
    grad_mode: bool
    """Whether gradients were enabled: some kernels keep more for a backward."""

    def __call__(self, sources: Sequence[torch.UntypedStorage]) -> Any:
        """The result once more, from the bytes of each view's content."""
        tensors = iter([fresh_view(source, view) for source, view in zip(sources, self.views, strict=True)])
        args = _filled(self.args, tensors)
        kwargs = dict(zip(self.kwargs, _filled(tuple(self.kwargs.values()), tensors), strict=True))
        with torch.set_grad_enabled(self.grad_mode), self.state or nullcontext():
            return self.func(*args, **kwargs)


class RandomState:
    """A generator's state before a call that draws from it; the call is repeated inside, and nobody notices."""

    __slots__ = ("_before", "_generator", "_now")

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._before = bytes(array_of(generator.get_state()))  # no tensor, which would count for the device

    def __enter__(self) -> None:
        self._now = self._generator.get_state()
        self._generator.set_state(torch.frombuffer(bytearray(self._before), dtype=torch.uint8))

    def __exit__(self, *_: object) -> None:
        self._generator.set_state(self._now)


def flat_tensors(values: Iterable[Any], found: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in arguments or results, in order, through lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            flat_tensors(value, found)
    return found


def replaced(values: Sequence[Any], others: Iterator[Any]) -> tuple[Any, ...]:
    """The same arguments with each tensor replaced by the next of ``others``."""
    return tuple(
        [
            next(others)
            if isinstance(value, torch.Tensor)
            else type(value)(replaced(value, others))
            if isinstance(value, list | tuple)
            else value
            for value in values
        ]
    )


def fresh_storages(
    result: Any, given: Sequence[torch.UntypedStorage], device: torch.device
) -> list[torch.UntypedStorage]:
    """The storages in a result that were not given, each once, in order of appearance."""
    known = {key_of(storage) for storage in given}
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in flat_tensors((result,), []):
        if tensor.layout != torch.strided:
            continue
        storage = storage_of(tensor)
        if tensor.device == device and key_of(storage) not in known:
            found[key_of(storage)] = storage
    return list(found.values())


def _filled(values: Sequence[Any], tensors: Iterator[torch.Tensor]) -> tuple[Any, ...]:
    return tuple(
        next(tensors)
        if isinstance(value, View)
        else torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        if isinstance(value, Scratch)
        else type(value)(_filled(value, tensors))
        if isinstance(value, list | tuple)
        else value
        for value in values
    )
