"""What an op costs on its device: seconds, bytes of workspace, and the bytes its outputs really take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class Cost:
    """Seconds of one run, the workspace beside inputs and outputs, and the bytes of each new storage it returns.

    ``in_place`` says that the op writes over an input that nobody reads any more, if there is one of the right size.
    """

    seconds: float
    workspace: int = 0
    outputs: tuple[int, ...] | None = None
    in_place: bool = False


def signature(node: fx.Node) -> str:
    """Two nodes with the same signature cost the same: op, shapes, strides, dtypes, and every other argument."""
    args, kwargs = tree_map(_describe, (node.args, dict(node.kwargs)))
    return f"{node.target}({args}, {kwargs})"


def _describe(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        if isinstance(value, torch.Tensor):
            kind = str(value.dtype).removeprefix("torch.")
            return f"{kind}{list(value.shape)}{list(value.stride())}{value.device.type}"
        return repr(value)
    if isinstance(argument, torch.device):
        return argument.type
    return argument if isinstance(argument, int | float | bool | type(None)) else str(argument)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in what a node was traced with or an op returned."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
