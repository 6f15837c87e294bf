"""The joint forward and backward graph of a step, read as ops over storages.

A *value* is a storage. Views, ``detach`` and ``getitem`` make no storage: they are folded into the value they look at
and made again from it wherever they are needed. So is, in compiled mode, what a fused kernel computes on the way and
never writes. What is left are the ops, each with the values it reads and writes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from recoup.errors import CaptureError
from recoup.graph import Phase
from recoup.torch.costs import tensors_of
from recoup.torch.internals.graphs import (
    is_of_backward,
    is_of_forward,
    is_once,
    is_random,
    mutated_inputs,
    output_node,
    written_input,
)
from recoup.torch.internals.tensors import storage_key

ARRIVAL = "tangents"  # the id of the op that stands for "the gradient of the outputs is there"
BATCH_NORMS = {  # the training-mode batch norms, and where their new running statistics are among what they return
    torch.ops.aten._native_batch_norm_legit_functional.default: (3, 4),
    torch.ops.aten._batch_norm_with_update_functional.default: (4, 5),
}


@dataclass(frozen=True)
class Storage:
    """A storage that the step makes or is given: a name, its bytes, and on which device."""

    id: str
    bytes: int
    device: torch.device


@dataclass(frozen=True, eq=False)
class JointOp:
    """One op: its node, the storages it reads and writes, and what it may not do."""

    id: str
    node: fx.Node
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    phase: Phase
    once: bool
    random: bool
    when_again: Mapping[fx.Node, fx.Node]
    """What a later run reads instead, and does not replace: a batch norm's old running statistics are gone, and do not
    matter; its new ones are those of its first run."""


@dataclass(frozen=True, eq=False)
class Joint:
    """Ops in the program's order, forward first, and the storages they read and write, by number."""

    module: fx.GraphModule
    num_forward_outputs: int
    folded: Set[fx.Node]
    """What a compiler computes inside of what reads it."""
    storages: list[Storage] = field(default_factory=list)
    ops: list[JointOp] = field(default_factory=list)
    storage_of: dict[fx.Node, int] = field(default_factory=dict)
    """The storage of each node that is a tensor, or looks at one."""
    maker: dict[fx.Node, JointOp] = field(default_factory=dict)
    """The op behind each node that holds something an op returned, and is not a view of it."""
    roots: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    """What each node is made from, seen through what is folded: op results, inputs, constants; itself if it is one."""

    @cached_property
    def outputs(self) -> tuple[list[Any], list[Any]]:
        """The nodes (or None) that the forward returns, and those that the backward returns."""
        flat = list(output_node(self.module.graph).args[0])  # type: ignore[arg-type]
        return flat[: self.num_forward_outputs], flat[self.num_forward_outputs :]

    @cached_property
    def inputs(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """The forward's inputs, and the gradients of its outputs that the backward is given."""
        given = list(self.module.graph.find_nodes(op="placeholder"))
        return [node for node in given if not _is_tangent(node)], [node for node in given if _is_tangent(node)]

    @cached_property
    def stays(self) -> set[int]:
        """The storages that must be there at the end: what forward and backward return."""
        returned = [node for half in self.outputs for node in half if isinstance(node, fx.Node)]
        return {self.storage_of[node] for node in returned if node in self.storage_of}


def read_joint(module: fx.GraphModule, num_forward_outputs: int, folded: Set[fx.Node] = frozenset()) -> Joint:
    """Read what AOTAutograd traced; ``folded`` nodes are no ops, but part of whatever reads them.

    Nodes that no output needs are left out, unless they draw random numbers or write to an input. What draws in the
    backward does so there; what reads an input that is overwritten does so in the forward.
    """
    joint = Joint(module, num_forward_outputs, folded)
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    given = [node for node in nodes if node.op != "call_function"]
    late = from_tangents(module.graph)
    end = max((index for index, node in enumerate(nodes, 1) if is_of_forward(node)), default=len(nodes))
    early = [node for node in nodes[:end] if node not in late]
    writing = {node: target for node in nodes if (target := written_input(node)) is not None}
    if any(node in late or is_of_backward(node) for node in writing):
        raise CaptureError(
            "the backward of this program writes to one of its buffers or inputs (in an autograd.Function?), which a "
            "planned step cannot repeat or undo: write there in the forward or after the backward"
        )
    drawing = {node for node in nodes if is_random(node)}
    wanted = _needed([*joint.outputs[1], *drawing])
    overwritten = mutated_inputs(module) | set(writing.values())
    effects = {*writing, *drawing.intersection(early), *wanted.intersection(_readers(overwritten, early))}
    in_forward = _needed([*joint.outputs[0], *effects]) - set(given)
    in_backward = wanted - in_forward - set(given)
    reader = _Reader(joint, overwritten)
    for node in given:
        reader.add(node, "forward")
    for node in nodes:
        if node in in_forward:
            reader.add(node, "forward")
    fixed = late | {node for node in nodes if node in drawing or is_once(node)}
    for node in _when_needed([node for node in nodes if node in in_backward], fixed):
        reader.add(node, "backward")
    return joint


def _when_needed(nodes: list[fx.Node], fixed: Set[fx.Node]) -> list[fx.Node]:
    """Those that are not ``fixed`` right before the first that reads them, and not as early as they could be.

    The forward's trace has what only the backward reads, such as the indices of a pool's maxima.
    """
    number = {node: index for index, node in enumerate(nodes)}
    when: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        readers = [when[user] for user in node.users if user in when]
        when[node] = number[node] if node in fixed else min(readers, default=number[node])
    return sorted(nodes, key=lambda node: (when[node], number[node]))


def from_tangents(graph: fx.Graph) -> set[fx.Node]:
    """The gradients of the outputs and every node that is computed from them: these can only run in the backward."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_tangent(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


@dataclass
class _Reader:
    """Adds nodes to a joint graph one by one."""

    joint: Joint
    overwritten: set[fx.Node]
    numbers: dict[int, int] = field(default_factory=dict)

    def add(self, node: fx.Node, phase: Phase) -> None:
        """An input, something an op returned, a view of something, or an op."""
        joint, tensors = self.joint, tensors_of(node.meta.get("val"))
        inputs = [root for other in node.all_input_nodes for root in joint.roots[other]]
        if node in joint.folded:
            joint.roots[node] = tuple(dict.fromkeys(inputs))
            return
        before = len(joint.storages)
        for position, tensor in enumerate(tensors):
            key = storage_key(tensor)
            if key not in self.numbers:
                self.numbers[key] = len(joint.storages)
                name = node.name if len(tensors) == 1 else f"{node.name}.{position}"
                joint.storages.append(Storage(name, int(tensor.untyped_storage().nbytes()), tensor.device))
        if tensors:
            joint.storage_of[node] = self.numbers[storage_key(tensors[0])]
        source = node.args[0] if node.target is operator.getitem else None
        joint.roots[node] = (node,)
        if isinstance(source, fx.Node) and source in joint.maker:
            joint.maker[node] = joint.maker[source]
        elif node.op == "call_function" and (len(joint.storages) > before or not tensors or written_input(node)):
            self._add_op(node, phase, tuple(range(before, len(joint.storages))), inputs)
        elif node.op == "call_function":
            joint.roots[node] = tuple(dict.fromkeys(inputs))

    def _add_op(self, node: fx.Node, phase: Phase, writes: tuple[int, ...], roots: list[fx.Node]) -> None:
        joint = self.joint
        when_again = _running_statistics(node)
        reads = {joint.storage_of[root] for root in roots if root in joint.storage_of}
        op = JointOp(
            id=node.name,
            node=node,
            reads=tuple(sorted(reads)),
            writes=writes,
            phase=phase,
            once=is_once(node) or bool((set(roots) & self.overwritten) - set(when_again)),
            random=is_random(node),
            when_again=when_again,
        )
        joint.ops.append(op)
        joint.maker[node] = op


def _running_statistics(node: fx.Node) -> dict[fx.Node, fx.Node]:
    """Old to new running statistics. A training-mode batch norm returns new ones; nothing else depends on the old."""
    places = BATCH_NORMS.get(node.target)  # type: ignore[call-overload]
    if places is None or (places == (3, 4) and node.args[5] is not True):
        return {}
    new = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    return {old: new[place] for old, place in zip(node.args[3:5], places, strict=True) if place in new}  # type: ignore[misc]


def _needed(outputs: Iterable[Any]) -> set[fx.Node]:
    """Every node that these outputs are computed from."""
    needed: set[fx.Node] = set()
    stack = [node for node in outputs if isinstance(node, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed


def _readers(inputs: set[fx.Node], nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes that read one of these inputs, if only through a view, and are no views of it."""
    keys = _keys(inputs)
    reading = [node for node in nodes if not keys.isdisjoint(_keys(node.all_input_nodes))]
    return [node for node in reading if keys.isdisjoint(_keys([node]))]


def _keys(nodes: Iterable[fx.Node]) -> set[int]:
    return {storage_key(tensor) for node in nodes for tensor in tensors_of(node.meta.get("val"))}


def _is_tangent(node: fx.Node) -> bool:
    """Whether it is the gradient of an output, which the backward is given."""
    return node.op == "placeholder" and node.name.startswith("tangents")
