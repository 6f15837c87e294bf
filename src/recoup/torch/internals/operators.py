"""Operators that eager mode traces as a plain step runs them, where PyTorch would trace what they are made of.

While AOTAutograd traces, PyTorch takes an operator's decomposition in Python, where there is one, before its derivative
is found. Most compute the same to the last bit. Linear and cubic interpolation do not, and as dozens of operators any
interpolation takes several times the time and memory. Dropout does not where it drops everything, or rounds to 16 bits
on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
SMOOTH = ("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d")
_NEAREST = tuple(f"{name}{sides}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for sides in (1, 2, 3))
_KINDS = ("default", "vec")
_EQUAL = (torch.float32, torch.float64)  # in these, dropout's mask and its noise make the same numbers on a CPU

_Kernels = dict[DispatchKey, Callable[..., Any]]


@contextmanager
def plain_operators() -> Iterator[None]:
    """Trace these operators as they are; for one thread at a time."""
    interpolations = [getattr(getattr(torch.ops.aten, name), kind) for name in SMOOTH + _NEAREST for kind in _KINDS]
    replaced: list[tuple[Any, _Kernels]] = []
    try:
        for operator in interpolations:
            replaced.append((operator, _replace(operator, {})))
        dropout = torch.ops.aten.dropout.default
        kernels = {key: _dropout(kernel) for key, kernel in dropout.py_kernels.items() if key in _KEYS}
        replaced.append((dropout, _replace(dropout, kernels)))
        yield
    finally:
        for operator, kernels in replaced:
            _replace(operator, kernels)


def _replace(operator: Any, kernels: _Kernels) -> _Kernels:
    """Give an operator these kernels in Python, and return those that it had."""
    before = {key: operator.py_kernels.pop(key) for key in _KEYS if key in operator.py_kernels}
    operator.py_kernels.update(kernels)
    operator._dispatch_cache.clear()
    return before


def _dropout(decomposed: Callable[..., Any]) -> Callable[..., Any]:
    """A mask takes a quarter of the memory that the noise takes which a plain step keeps on a CPU."""

    def dropout(x: Tensor, p: float, train: bool) -> Tensor:
        if x.device.type == "cpu" and x.dtype in _EQUAL and p != 1:
            return decomposed(x, p, train)
        return torch.ops.aten.dropout.default._op_dk(DispatchKey.CompositeImplicitAutograd, x, p, train)

    return dropout
