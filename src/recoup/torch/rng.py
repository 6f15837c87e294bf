"""Random ops replay: the first run notes the generator's state, every later run starts from it and puts it back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from recoup.torch.internals.graphs import RUN_AND_SAVE_STATE, RUN_WITH_STATE

CPU_STATE_BYTES = torch.get_rng_state().numel()
_drawing = threading.RLock()
"""The generator is one for all threads, so two planned steps must not draw and replay at the same time."""


def run_first(op: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """The generator's state, and what the op returns."""
    with _drawing:
        state = _get(_device(args, kwargs))
        return state, op(*args, **kwargs)


def run_once(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the op returns; nobody replays meanwhile."""
    with _drawing:
        return op(*args, **kwargs)


def run_again(state: torch.Tensor, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the op returned when the generator was in ``state``; the generator is left as it was found."""
    device = _device(args, kwargs)
    with _drawing:
        now = _get(device)
        _set(device, state)
        try:
            return op(*args, **kwargs)
        finally:
            _set(device, now)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    return next((arg.device for arg in args if isinstance(arg, torch.Tensor)), torch.device("cpu"))


def _get(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _set(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


@dataclass(frozen=True)
class Replay:
    """How a graph says it: ``first(op, *args)`` is a state and a result, ``again(state, op, *args)`` the result, and
    ``once(op, *args)`` that of an op which is not replayed; without it the op is called as it is."""

    first: Callable[..., Any]
    again: Callable[..., Any]
    once: Callable[..., Any] | None = None


EAGER = Replay(run_first, run_again, run_once)
INDUCTOR = Replay(RUN_AND_SAVE_STATE, RUN_WITH_STATE)
"""PyTorch's own, which Inductor can call. They are for the current device; in the backward autograd sees to that."""
