"""The arguments of a call, read in one pass: what its cost depends on, what it reads, and how to repeat it.

Every operator of the program comes through here, so there is one loop and little else.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch

from recoup.online.adapter import describe
from recoup.online.calls import Call, RandomState, Repetition, Scratch, View, flat_tensors, replaced
from recoup.online.contents import Content
from recoup.online.keeper import Keeper
from recoup.online.learned import Learned
from recoup.online.operators import SIZED_BY_FLOATS, STATISTICS, number_places

_VALUES = frozenset((int, bool, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format))
_SMALL = 16  # elements: arguments of another device up to this size are copied into the call


class Arguments:
    """Of one call."""

    __slots__ = ("_foreign", "_names", "_places", "_repeatable", "_views", "contents", "key", "tensors")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], keeper: Keeper) -> None:
        self.key: list[Any] = [func]
        """The same for calls that cost the same."""
        self.tensors: list[torch.Tensor] = []
        self.contents: list[Content | None] = []
        self._views: list[View] = []
        self._foreign = False
        self._repeatable = True
        self._places = self._read(args, keeper, number_places(func))
        self._names: dict[str, Any] = {}
        if not self.tensors and func.overloadpacket.__name__ in SIZED_BY_FLOATS:
            self.key.append(repr(args))
        if kwargs:
            self.key.append(tuple(kwargs))
            self._names = dict(zip(kwargs, self._read(kwargs.values(), keeper), strict=True))

    def _read(self, values: Iterable[Any], keeper: Keeper, numbers: Container[int] = ()) -> list[Any]:
        """The values with views in place of tensors; where ``numbers`` are, they change no size."""
        key = self.key
        places: list[Any] = []
        for at, value in enumerate(values):
            kind = type(value)
            if isinstance(value, torch.Tensor):
                content = keeper.content_of(value)
                self.tensors.append(value)
                self.contents.append(content)
                if content is None:
                    self._foreign = True
                    key += (None if value.is_nested else value.shape, value.layout, value.dtype)
                    places.append(value)
                    continue
                shape, stride, dtype = value.shape, value.stride(), value.dtype
                key += (shape, stride, dtype)
                if value.is_neg() or (dtype.is_complex and value.is_conj()):
                    self._repeatable = False
                view = View(content, dtype, (int(value.storage_offset()), shape, stride))
                self._views.append(view)
                places.append(view)
            elif isinstance(value, list | tuple):
                if value and type(value[0]) in (int, bool):  # a shape, strides, which outputs
                    key.append(tuple(value))
                    places.append(value)
                    continue
                key.append(len(value))
                read = self._read(value, keeper)
                places.append(read if kind is list else tuple(read))
            else:  # the value of a float changes no size; a rate that decays is no new operator
                key.append(value if kind in _VALUES and at not in numbers else kind)
                places.append(value)
        return places

    def call(
        self, func: Any, statistics: Sequence[torch.Tensor], state: RandomState | None, known: Learned
    ) -> Call | None:
        """The call, to be run again; None if something that it read cannot be kept.

        It wrote to ``statistics``, if there are any, and did not read them.
        """
        places, names, views = self._places, self._names, self._views
        if statistics:
            left_out = [place for place in places[STATISTICS] if isinstance(place, View)]
            places[STATISTICS] = map(Scratch, statistics)
            views = [view for view in views if view not in left_out]
        if not self._repeatable or any(view.content.exposed for view in views):
            return None
        if self._foreign:
            foreign = flat_tensors((places, tuple(names.values())), [])
            if any(tensor.numel() > _SMALL for tensor in foreign):
                return None
            copies = iter([tensor.detach().clone() for tensor in foreign])
            places = list(replaced(places, copies))
            names = dict(zip(names, replaced(tuple(names.values()), copies), strict=True))
        again = Repetition(func, tuple(places), names, views, state, torch.is_grad_enabled())
        return Call(describe(func), again, [view.content for view in views], known)
