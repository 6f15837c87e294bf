"""What the runtime must know of an operator before it may run it a second time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from recoup.online.calls import flat_tensors
from recoup.torch.internals.graphs import COLLECTIVES, NONDETERMINISTIC
from recoup.torch.internals.tensors import is_made_of_others

STATISTICS = slice(3, 5)
"""Where a batch norm has its running statistics."""
_FLAGS = {
    "native_batch_norm": 5,
    "cudnn_batch_norm": 5,
    "miopen_batch_norm": 5,
    "_batch_norm_with_update": -1,
    "native_batch_norm_backward": 7,
    "batch_norm_backward": 7,
    "cudnn_batch_norm_backward": -1,
    "miopen_batch_norm_backward": -1,
}
"""Batch norms that write to their running statistics, whether they say so or not, and do not read them; and backwards,
which do neither. Where the flag is that makes them, or -1 for always."""
SIZED_BY_FLOATS = ("arange", "range")
_NEW_STORAGE = {"set_", "resize_", "resize_as_", "set_data"}


@dataclass(frozen=True, slots=True)
class Traits:
    """How an operator behaves beyond its result."""

    writes: tuple[int | str, ...]
    """Arguments that it writes to, by position or name."""
    resizes: bool
    """Whether one of those is an ``out=``, which may be made larger."""
    random: bool
    repeatable: bool
    """Whether a second run gives the same bits: no communication, no sums in any order."""
    moves_storage: bool
    """Whether it changes a tensor's storage itself."""
    looks: bool
    """Whether it only makes views: no byte is read or written."""
    training_flag: int
    """For a batch norm that does not read its running statistics, which argument says so; -1: always, 0: no such."""
    backward: bool
    """Whether it does not write to them either."""
    sized_by_floats: bool
    """Whether it makes something of numbers whose size depends on fractions among them."""

    @property
    def simple(self) -> bool:
        """Whether repeating it takes no more than its arguments."""
        return self.repeatable and not (self.random or self.moves_storage or self.resizes)

    def statistics(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """Running statistics that this call does not read."""
        if self.training_flag == 0 or (self.training_flag > 0 and not args[self.training_flag]):
            return []
        return [value for value in args[STATISTICS] if value is not None]

    def updated(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """Running statistics that this call writes to."""
        return [] if self.backward else self.statistics(args)


@cache
def number_places(func: Any) -> frozenset[int]:
    """Which arguments are tensors. A number in place of one changes no size: a count may be another in each step."""
    arguments = enumerate(func._schema.arguments)
    return frozenset(at for at, argument in arguments if isinstance(argument.type, torch.TensorType))


def written_tensors(traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """What a call's schema says that it writes to."""
    found: list[torch.Tensor] = []
    for place in traits.writes:
        value = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
        flat_tensors((value,), found)
    return found


def read_traits(func: Any, device: torch.device) -> Traits:
    """From the schema, its tags, and what schemas leave out."""
    name = func.overloadpacket.__name__
    writes: list[int | str] = []
    position = 0
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(argument.name if argument.kwarg_only else position)
        position += 0 if argument.kwarg_only else 1
    differs = device.type == "cuda" and name.rstrip("_") in NONDETERMINISTIC
    return Traits(
        tuple(writes),
        any(isinstance(place, str) for place in writes),
        torch.Tag.nondeterministic_seeded in func.tags,
        func.namespace not in COLLECTIVES and not differs,
        name in _NEW_STORAGE,
        not writes and _only_looks(func),
        _FLAGS.get(name, 0),
        name.endswith("_backward"),
        name in SIZED_BY_FLOATS,
    )


def _only_looks(func: Any) -> bool:
    """Every result is a view by its schema. Those of operators made of others (``reshape``) may be copies."""
    if is_made_of_others(func):
        return False
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None for one in returns)
