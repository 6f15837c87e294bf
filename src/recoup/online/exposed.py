"""Ways past the dispatcher to a tensor's bytes: what they are called on must be there, and stay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.dlpack

EXPOSING = (
    "numpy", "tolist", "data_ptr", "untyped_storage", "storage", "_typed_storage", "__array__", "__dlpack__",
    "share_memory_",
)  # fmt: skip
"""Methods whose result reaches the bytes without an operator."""
FLEETING = ("tolist",)  # the bytes are copied before the call returns


@contextmanager
def exposing_methods(touch: Callable[[torch.Tensor, bool], None]) -> Iterator[None]:
    """While this lasts, ``touch(tensor, lasting)`` is called before a tensor's bytes are given out of our hands."""
    places: list[tuple[Any, str]] = [(torch.Tensor, name) for name in EXPOSING]
    places += [(module, "to_dlpack") for module in (torch, torch.utils.dlpack) if hasattr(module, "to_dlpack")]
    own = [(owner, name, vars(owner).get(name)) for owner, name in places]
    for owner, name in places:
        setattr(owner, name, _touching(getattr(owner, name), touch, name not in FLEETING))
    try:
        yield
    finally:
        for owner, name, method in own:
            if method is None:
                delattr(owner, name)
            else:
                setattr(owner, name, method)


def _touching(method: Callable[..., Any], touch: Callable[[torch.Tensor, bool], None], lasting: bool) -> Any:
    @functools.wraps(method)
    def wrapped(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        touch(self, lasting)
        return method(self, *args, **kwargs)

    return wrapped
