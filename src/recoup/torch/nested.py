"""The tensors in what a program takes and returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclasses."""
    parts: Iterable[Any] = ()
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        parts = thing.values()
    elif isinstance(thing, tuple | list):
        parts = thing
    elif is_dataclass(thing) and not isinstance(thing, type):
        parts = [getattr(thing, field.name, None) for field in fields(thing)]
    for part in parts:
        yield from tensors_in(part)
