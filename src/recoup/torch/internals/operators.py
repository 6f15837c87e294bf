"""Operators that eager mode traces as a plain step runs them, where PyTorch would trace what they are made of.

While AOTAutograd traces, PyTorch takes an operator's decomposition in Python, where there is one, before its derivative
is found. Most compute the same to the last bit. Linear and cubic interpolation do not, and as dozens of operators any
interpolation takes several times the time and memory; nor do losses with margins for several classes, nor softshrink
where a gradient is infinite. Dropout does not where it drops everything, and on a CPU not in 16 bits, nor with one
probability in five.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import DispatchKey

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
SMOOTH = ("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d")
_NEAREST = tuple(f"{name}{sides}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for sides in (1, 2, 3))
_OTHERS = ("multi_margin_loss", "multilabel_margin_loss_forward", "softshrink")
_KINDS = ("default", "vec")
_NUMBERS: dict[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}

_Kernels = dict[DispatchKey, Callable[..., Any]]


@contextmanager
def plain_operators(for_gpu: bool) -> Iterator[None]:
    """Trace these operators as they are; for one thread at a time.

    ``for_gpu`` says that what is on the CPU stands for what will be on a GPU, where dropout is one operator.
    """
    packets = [getattr(torch.ops.aten, name) for name in SMOOTH + _NEAREST + _OTHERS]
    whole = [getattr(packet, kind) for packet in packets for kind in _KINDS if kind in packet.overloads()]
    replaced: list[tuple[Any, _Kernels]] = []
    try:
        for operator in whole:
            replaced.append((operator, _replace(operator, {})))
        dropout = torch.ops.aten.dropout.default
        kernels = {key: _dropout(kernel, for_gpu) for key, kernel in dropout.py_kernels.items() if key in _KEYS}
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


def _dropout(masked: Callable[..., Any], for_gpu: bool) -> Callable[..., Any]:
    """On a CPU, too, with a mask where that makes no difference: the noise that a plain step keeps takes four times the
    memory. What drops nothing returns what it is given, and not a copy."""

    def dropout(x: Tensor, p: float, train: bool) -> Tensor:
        same = for_gpu or (x.device.type == "cpu" and _is_one_factor(p, x.dtype))
        if same and train and 0 < p < 1 and x.numel():
            return masked(x, p, train)
        return torch.ops.aten.dropout.default._op_dk(DispatchKey.CompositeImplicitAutograd, x, p, train)

    return dropout


def _is_one_factor(p: float, dtype: torch.dtype) -> bool:
    """Whether what is left is multiplied by the same number: with a mask it is divided in double precision, as noise
    in the tensor's own."""
    number = _NUMBERS.get(dtype)
    return number is not None and p < 1 and bool(number(1) / number(1 - p) == number(1 / (1 - p)))
