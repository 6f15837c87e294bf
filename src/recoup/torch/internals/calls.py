"""What calling a module runs, and how a plan is put in its place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn

_CALLS = {"__call__", "_wrapped_call_impl", "_compiled_call_impl", "_wrapped_call"}  # the last is what fx's modules do


def called_plainly(module: nn.Module) -> Callable[..., Any]:
    """What calling the module runs, hooks included, when nothing was compiled."""
    return module._call_impl


def called_instead(module: nn.Module) -> Callable[..., Any] | None:
    """What :func:`call_instead` has set."""
    return module._compiled_call_impl


def call_instead(module: nn.Module, function: Callable[..., Any] | None) -> None:
    """Let calling the module run ``function``, as ``module.compile()`` does; a copy or a pickle is without it."""
    module._compiled_call_impl = function


def is_called_past(module: nn.Module) -> bool:
    """Whether calling the module may pass by what :func:`call_instead` sets: TorchScript's, or one whose class has a
    ``__call__`` of its own in which nothing names the one of :class:`torch.nn.Module`."""
    classes = itertools.takewhile(lambda kind: kind is not nn.Module, type(module).__mro__)
    own = [vars(kind)["__call__"] for kind in classes if "__call__" in vars(kind)]
    return isinstance(module, torch.jit.ScriptModule) or not all(
        any(not _CALLS.isdisjoint(code.co_names) for code in _codes(call)) for call in own
    )


def _codes(call: Any) -> Iterator[CodeType]:
    """The code of a function, of those that it wraps, and of those inside of it."""
    left, seen = [call], list[Any]()
    while left:
        part = left.pop()
        if any(part is one for one in seen):
            continue
        seen.append(part)
        if isinstance(part, CodeType):
            yield part
            left += [constant for constant in part.co_consts if isinstance(constant, CodeType)]
        elif isinstance(part, FunctionType):
            left += [part.__code__, *(cell.cell_contents for cell in part.__closure__ or () if cell != CellType())]
        elif isinstance(part, partial | partialmethod):
            left.append(part.func)
