"""What calling a module runs, and how a plan is put in its place."""

from __future__ import annotations

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


def calls_itself(module: nn.Module) -> bool:
    """Whether the module's class has a ``__call__`` of its own."""
    return type(module).__call__ is not nn.Module.__call__


def is_called_past(module: nn.Module) -> bool:
    """Whether calling the module may pass by what :func:`call_instead` sets: TorchScript's, or one whose class has a
    ``__call__`` of its own in which nothing names the one of :class:`torch.nn.Module`."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    for call in (vars(kind)["__call__"] for kind in type(module).__mro__ if "__call__" in vars(kind)):
        if call is nn.Module.__call__:
            return False
        names = {name for code in _codes(call) for name in code.co_names}
        if _CALLS.isdisjoint(names):
            return True
        if "super" not in names:
            return False  # it says whose
    return False


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
            left += [*(part.__defaults__ or ()), *(part.__kwdefaults__ or {}).values()]
        elif isinstance(part, partial | partialmethod):
            left.append(part.func)
        elif part is call:  # a decorator that is a class
            left += [kept for name, kept in getattr(part, "__dict__", {}).items() if name != "__wrapped__"]
