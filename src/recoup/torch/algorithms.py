"""cuDNN chooses an algorithm for each convolution, once in a process and on each thread: how fast, in which workspace.

With ``torch.backends.cudnn.benchmark`` it tries them all when it first meets one, with all the workspace there is. So
that no step does, it meets every convolution here first, where the step will run it: the forward on the caller's
thread, the backward, in which everything may run again, on autograd's. Where no plan fits with what it chose, it has to
choose again, in less memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from recoup.torch import measuring
from recoup.torch.costs import Cost, signature
from recoup.torch.estimate import estimate
from recoup.torch.internals.tensors import real_tensors
from recoup.torch.joint import from_tangents
from recoup.torch.measuring import measured_as
from recoup.torch.store import Store, library_versions

LESS = 0.9  # of the workspace within which no algorithm was found: for more than this it is not looked for again

Listener = Callable[[int, int], None]


class _Choice(NamedTuple):
    """What cuDNN chooses an algorithm for."""

    device: str
    versions: str
    key: str
    in_forward: bool
    """Or in the backward alone."""


_tried: dict[_Choice, Cost] = {}
_rooms: dict[_Choice, int] = {}
"""Bytes of workspace within which a choice had to be made again."""


class Untried(Exception):  # noqa: N818
    """While a step is traced: cuDNN has yet to try its algorithms for some convolutions, or to choose again."""

    def __init__(self, measure: Callable[[], None]) -> None:
        super().__init__("cuDNN has algorithms to try")
        self.measure = measure


def with_algorithms(trace: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """What ``trace`` returns, once cuDNN has tried the algorithms of what is in it, and it was traced again.

    Not meanwhile: AOTAutograd keeps a backward on the thread that calls it, and a lock is held that somebody else's
    backward, on the thread on which it would run, may be waiting for.
    """
    while True:
        try:
            return trace()
        except Untried as found:
            measure = found.measure
        measure()


def costs(nodes: Iterable[fx.Node], store: Store, listen: Listener, channels_last: bool = False) -> dict[str, Cost]:
    """The cost of every signature that cuDNN has algorithms for; :class:`Untried` if it has yet to try some.

    It may choose others in each process: the seconds are those of before, so that the plan is, too, and the workspace
    is that of now, the larger one of both threads.
    """
    nodes = list(nodes)
    distinct = {signature(node): node for node in nodes}
    choices = _choices(nodes, store.device, channels_last)
    untried = {choice: (distinct[key], None) for key, choice in choices.items() if choice not in _tried}
    if untried:
        raise Untried(partial(_try, untried, store, listen, channels_last))
    return {
        key: replace(store.cost(_kept_as(choice)) or _tried[choice], workspace=_tried[choice].workspace)
        for key, choice in choices.items()
    }


def has_choices(nodes: Iterable[fx.Node], device: torch.device) -> bool:
    """Whether cuDNN has algorithms for any of them."""
    return any(_has_algorithms(signature(node), device) for node in nodes)


def workspaces(nodes: Iterable[fx.Node], device: torch.device, channels_last: bool = False) -> dict[fx.Node, int]:
    """Bytes that the chosen algorithms work in, for what there are algorithms to choose from."""
    nodes = list(nodes)
    choices = _choices(nodes, device, channels_last)
    return {node: _tried[choice].workspace for node in nodes if (choice := choices.get(signature(node))) in _tried}


def choose_again(
    rooms: Mapping[fx.Node, int], nodes: Iterable[fx.Node], store: Store, listen: Listener, channels_last: bool = False
) -> Untried | None:
    """To be raised: cuDNN is to choose algorithms that work in so many bytes. None if it was asked for that in vain."""
    choices = _choices(nodes, store.device, channels_last)
    less: dict[_Choice, tuple[fx.Node, int]] = {}
    for node, room in rooms.items():
        choice = choices[signature(node)]
        less[choice] = (node, min(room, less.get(choice, (node, room))[1]))
    less = {choice: one for choice, one in less.items() if one[1] < _known_in_vain(choice)}
    return Untried(partial(_try, less, store, listen, channels_last)) if less else None


def _known_in_vain(choice: _Choice) -> float:
    """The bytes from which on there is no use in asking for less than what was chosen."""
    asked = _rooms.get(choice)
    return math.inf if asked is None or _tried[choice].workspace <= asked else LESS * asked


def _choices(nodes: Iterable[fx.Node], device: torch.device, channels_last: bool) -> dict[str, _Choice]:
    """What cuDNN has algorithms for, by signature."""
    nodes, versions = list(nodes), library_versions()
    late = from_tangents(nodes[0].graph) if nodes else set()
    forward = {signature(node) for node in nodes if node not in late}
    return {
        key: _Choice(str(device), versions, measured_as(key, channels_last), key in forward)
        for key in map(signature, nodes)
        if _has_algorithms(key, device)
    }


def _try(
    untried: Mapping[_Choice, tuple[fx.Node, int | None]], store: Store, listen: Listener, channels_last: bool
) -> None:
    """Where they will run, and within so many bytes where a number is given."""
    device = store.device
    with real_tensors(device), store.saving():
        for count, (choice, (node, room)) in enumerate(untried.items()):
            listen(count, len(untried))
            measure = partial(measuring.measure, node, device, channels_last, room)
            threads = [measure() if choice.in_forward else None, _in_backward(device, measure)]
            found = [cost for cost in threads if cost is not None]
            if room is not None:
                _rooms[choice] = room
            kept = store.cost(_kept_as(choice))
            cost = found[0] if found else _tried.get(choice) or kept or estimate(node, store.rates())
            _tried[choice] = replace(cost, workspace=max(one.workspace for one in found or [cost]))
            if kept is None:
                store.remember(_kept_as(choice), _tried[choice])
    listen(len(untried), len(untried))


def _kept_as(choice: _Choice) -> str:
    """What the store knows its seconds by: in less memory they are others."""
    return f"{choice.key} in 2**{_rooms[choice].bit_length()} bytes" if choice in _rooms else choice.key


def _has_algorithms(signature: str, device: torch.device) -> bool:
    """Whether cuDNN tries several for it, when it first meets it in a process."""
    return device.type == "cuda" and torch.backends.cudnn.benchmark and "convolution" in signature


def _in_backward(device: torch.device, measure: Callable[[], Cost | None]) -> Cost | None:
    """On the thread on which autograd runs the backward of what lies on the device."""
    found: list[Cost | None] = []
    with torch.enable_grad():
        result = torch.zeros((), device=device, requires_grad=True).clone()
        result.register_hook(lambda _: found.append(measure()))
        result.backward()
    return found[0]
