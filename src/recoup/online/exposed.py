"""Ways past the dispatcher to a tensor's bytes: what they are called on must be there, and stay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

EXPOSING = (
    "numpy", "tolist", "data_ptr", "untyped_storage", "storage", "_typed_storage", "__array__", "__dlpack__",
    "share_memory_", "__reduce_ex__",
)  # fmt: skip
"""Methods whose result reaches the bytes without an operator."""
FLEETING = ("tolist",)  # the bytes are copied before the call returns


@contextmanager
def exposing_methods(touch: Callable[[torch.Tensor, bool], None]) -> Iterator[None]:
    """While this lasts, ``touch(tensor, lasting)`` is called before a tensor's bytes are given out of our hands."""
    own = {name: torch.Tensor.__dict__.get(name) for name in EXPOSING}
    for name in EXPOSING:
        setattr(torch.Tensor, name, _touching(getattr(torch.Tensor, name), touch, name not in FLEETING))
    try:
        yield
    finally:
        for name, method in own.items():
            if method is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, method)


def _touching(method: Callable[..., Any], touch: Callable[[torch.Tensor, bool], None], lasting: bool) -> Any:
    @functools.wraps(method)
    def wrapped(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        touch(self, lasting)
        return method(self, *args, **kwargs)

    return wrapped
