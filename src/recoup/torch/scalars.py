"""Numbers that change from call to call: a temperature, the weight of a loss, a counter.

Dynamo hands a changing float over in a tensor, from which the captured graph takes it, and a changing int as it is.
(NumPy's numbers and what Python's ``random`` draws come in a tensor, too, and are used as one, like other inputs.) A
step is traced for fixed numbers, so every value would be a step of its own. Where a number only enters sums, products
and quotients with tensors it stays a tensor instead, which is what PyTorch makes of a number there, to the last bit.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from recoup.torch.internals.dynamo import is_float_in_a_tensor

_ARITHMETIC = {
    operator.add, operator.iadd, operator.sub, operator.isub, operator.mul, operator.imul,
    operator.truediv, operator.itruediv,
}  # fmt: skip


@dataclass(frozen=True)
class Scalars:
    """A captured graph in which numbers are tensors where they can be."""

    module: fx.GraphModule
    ints: frozenset[int]
    """The positions of the inputs that are ints for the caller, and tensors for the graph."""
    by_value: tuple[int, ...]
    """The positions of the floats, in tensors, that the graph has to be traced for one by one."""

    def given(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments as :attr:`module` takes them."""
        if not self.ints:
            return args
        return [_tensor(arg) if index in self.ints else arg for index, arg in enumerate(args)]

    def values(self, args: Sequence[Any]) -> tuple[float, ...]:
        """The numbers that the graph is traced for."""
        return tuple(args[index].item() for index in self.by_value)

    def key(self, args: Sequence[Any]) -> tuple[str, ...]:
        """The same for the same :meth:`values`: 0.0 and -0.0 are equal, and not the same."""
        return tuple(map(repr, self.values(args)))

    def fixed(self, args: Sequence[Any]) -> fx.GraphModule:
        """The graph for the numbers in these arguments."""
        if not self.by_value:
            return self.module
        module = _copied(self.module)
        inputs = list(module.graph.find_nodes(op="placeholder"))
        for index, value in zip(self.by_value, self.values(args), strict=True):
            for item in _items(inputs[index]):
                item.replace_all_uses_with(value)  # type: ignore[arg-type]
                module.graph.erase_node(item)
        module.recompile()
        return module


def read_scalars(module: fx.GraphModule) -> Scalars:
    """Find the numbers among a captured graph's inputs."""
    module = _copied(module)
    floats: list[fx.Node] = []
    ints: set[int] = set()
    by_value: list[int] = []
    readers: dict[tuple[fx.Node, fx.Node], None] = {}  # a set in order: two numbers may be read as one
    for index, node in enumerate(module.graph.find_nodes(op="placeholder")):
        is_float = is_float_in_a_tensor(node) and bool(_items(node))
        is_int = bool(node.users) and isinstance(node.meta.get("example_value"), torch.SymInt)
        if not (is_float or is_int):
            continue
        found = _readers(_items(node) if is_float else [node])
        if found is None:
            by_value += [index] if is_float else []
            continue
        readers.update(dict.fromkeys(found))
        if is_float:
            floats.append(node)
        else:
            ints.add(index)
    for reader, number in readers:
        _use_tensor(module.graph, reader, number)
    for node in floats:
        for item in _items(node):
            item.replace_all_uses_with(node)
            module.graph.erase_node(item)
    module.recompile()
    return Scalars(module, frozenset(ints), tuple(by_value))


def _items(node: fx.Node) -> list[fx.Node]:
    """Where the graph takes the number out of its tensor."""
    return [user for user in node.users if (user.op, user.target) == ("call_method", "item")]


def _readers(numbers: list[fx.Node]) -> list[tuple[fx.Node, fx.Node]] | None:
    """The nodes that combine tensors with these numbers, or with what is computed from them, each with its number.

    None if one of them is used in another way. A number divided by a tensor is one, too: PyTorch computes a reciprocal.
    """
    found = []
    stack = list(numbers)
    while stack:
        number = stack.pop()
        for user in number.users:
            if user.op != "call_function" or user.target not in _ARITHMETIC or len(user.args) != 2 or user.kwargs:
                return None
            if not isinstance(user.meta.get("example_value"), torch.Tensor):
                stack.append(user)
                continue
            other = user.args[0] if user.args[1] is number else user.args[1]
            backwards = user.args[0] is number and user.target in (operator.truediv, operator.itruediv)
            if backwards or not _combines(other):
                return None
            found.append((user, number))
    return found


def _combines(other: Any) -> bool:
    """Whether a tensor gives the same with a number as with a tensor that holds it (cast, if this one is as small)."""
    value = other.meta.get("example_value") if isinstance(other, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return value.dim() > 0 or value.dtype in (torch.float32, torch.float64)


def _use_tensor(graph: fx.Graph, reader: fx.Node, number: fx.Node) -> None:
    """A tensor without dimensions would be promoted by a float64 one; a number does not do that."""
    other: Any = reader.args[0] if reader.args[1] is number else reader.args[1]
    value = other.meta["example_value"]
    if value.dim() == 0 and value.dtype == torch.float32:
        with graph.inserting_before(reader):
            cast = graph.call_method("to", (number, torch.float32))
        reader.replace_input_with(number, cast)


def _tensor(number: int) -> torch.Tensor:
    return torch.tensor(float(number), dtype=torch.float64)


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    copied = fx.GraphModule(module, copy.deepcopy(module.graph))
    for old, new in zip(module.graph.nodes, copied.graph.nodes, strict=True):
        new.meta = old.meta
    return copied
