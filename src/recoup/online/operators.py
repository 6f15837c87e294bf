"""What the runtime must know of an operator before it may run it a second time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

aten = torch.ops.aten

_BATCH_NORMS = {"native_batch_norm": (3, 4, 5), "cudnn_batch_norm": (3, 4, 5), "miopen_batch_norm": (3, 4, 5)}
"""Running mean and variance, and the flag that says they are written to; the schema does not say so."""
_COLLECTIVES = ("_c10d_functional", "c10d_functional", "c10d", "symm_mem")
_ATOMIC = {"scatter_add", "scatter_reduce", "index_add", "index_put", "_unsafe_index_put", "put", "cumsum"}
_NEW_STORAGE = {"set_", "resize_", "resize_as_", "set_data"}


@dataclass(frozen=True, slots=True)
class Traits:
    """How an operator behaves beyond its result."""

    writes: tuple[int | str, ...]
    """Arguments that it writes to, by position or name."""
    random: bool
    replayable: bool
    moves_storage: bool
    """Whether it changes a tensor's storage itself."""


@cache
def traits(func: Any) -> Traits:
    """From the schema, its tags, and what schemas leave out."""
    schema = func._schema
    name = func.overloadpacket.__name__
    writes: list[int | str] = []
    position = 0
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(argument.name if argument.kwarg_only else position)
        position += 0 if argument.kwarg_only else 1
    return Traits(
        tuple(writes),
        torch.Tag.nondeterministic_seeded in func.tags,
        func.namespace not in _COLLECTIVES,
        name in _NEW_STORAGE,
    )


@cache
def differs_each_time(func: Any, device: str) -> bool:
    """Whether a second run may differ in its last bits: operators that add with atomics on CUDA."""
    return device == "cuda" and func.overloadpacket.__name__.rstrip("_") in _ATOMIC


def statistics_of(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Positions of running statistics that a batch norm in training mode writes to and does not read."""
    name = func.overloadpacket.__name__
    if name == "_batch_norm_with_update":
        return (3, 4)
    mean, variance, training = _BATCH_NORMS.get(name, (0, 0, 0))
    return (mean, variance) if training and args[training] else ()
