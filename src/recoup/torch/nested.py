"""The tensors in what a program takes and returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclasses, each once."""
    seen: dict[int, Any] = {}
    left = [thing]
    while left:
        part = left.pop()
        if id(part) not in seen:
            seen[id(part)] = part
            if isinstance(part, Tensor):
                yield part
            left.extend(reversed(_parts(part)))


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, Mapping):
        return list(thing.values())
    if isinstance(thing, tuple | list):
        return list(thing)
    if is_dataclass(thing) and not isinstance(thing, type):
        return [getattr(thing, field.name, None) for field in fields(thing)]
    return []
