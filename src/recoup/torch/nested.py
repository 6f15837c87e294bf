"""The tensors in what a program takes and returns."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
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


def moved(thing: Any, device: torch.device) -> Any:
    """The same with every tensor on ``device``, as a leaf."""
    if isinstance(thing, Tensor):
        return thing.detach().to(device).requires_grad_(thing.requires_grad)
    if isinstance(thing, Mapping):
        return {key: moved(value, device) for key, value in thing.items()}
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(moved(value, device) for value in thing))
    if isinstance(thing, tuple | list):
        return type(thing)(moved(value, device) for value in thing)
    if is_dataclass(thing) and not isinstance(thing, type):
        other = copy.copy(thing)  # not made anew, which may do more than to set its fields
        for name in (field.name for field in fields(thing) if hasattr(thing, field.name)):
            object.__setattr__(other, name, moved(getattr(thing, name), device))
        return other
    return thing
