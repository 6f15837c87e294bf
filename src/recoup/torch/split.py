"""A schedule becomes two fx graphs: the forward that runs until the gradient arrives, and the backward after it.

Every run of an op is a node of its own, so fx's "free after last use" is the judge's rule. What crosses from forward to
backward is what the schedule still reads after the gradient arrived; what is folded is made again on the other side.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from recoup.torch.costs import tensors_of
from recoup.torch.fusion import is_fused_kernel
from recoup.torch.internals.inductor import keep_place
from recoup.torch.joint import ARRIVAL, Joint, JointOp
from recoup.torch.rng import CPU_STATE_BYTES, Replay


def split(joint: Joint, steps: Sequence[str], replay: Replay) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward that run ``steps`` (op ids, with :data:`ARRIVAL` where the backward begins).

    Random ops that run more than once do so through ``replay``.
    """
    ops = {op.id: op for op in joint.ops}
    middle = steps.index(ARRIVAL)
    before, after = [ops[step] for step in steps[:middle]], [ops[step] for step in steps[middle + 1 :]]
    runs = Counter(steps)
    replayed = {op.id for op in joint.ops if op.random and runs[op.id] > 1}
    given, tangents = joint.inputs
    done: set[str] = set()

    forward = _Half(joint, fx.Graph(), replay, replayed)
    forward.take(given)
    forward.run(before, done)
    saved = _crossing(joint, after, done)
    states = [op.id for op in dict.fromkeys(after) if op.id in replayed & done]

    backward = _Half(joint, fx.Graph(), replay, replayed)
    backward.take(saved)
    for name in states:
        backward.states[name] = backward.graph.placeholder(f"{name}_rng")
        backward.states[name].meta.update(forward.states[name].meta)
    backward.take(tangents)
    backward.run(after, done)

    return (
        forward.close([*joint.outputs[0], *saved], [forward.states[name] for name in states]),
        backward.close(joint.outputs[1], []),
    )


def _crossing(joint: Joint, after: Sequence[JointOp], done: set[str]) -> list[fx.Node]:
    """What the backward reads before, or without, making it itself, in the order in which it first does."""
    made: set[str] = set()
    crossing: dict[fx.Node, None] = {}

    def read(nodes: Iterable[Any]) -> None:
        for node in nodes:
            for root in joint.roots[node] if isinstance(node, fx.Node) else ():
                remade = root in joint.maker and joint.maker[root].id in made
                if root in joint.maker and joint.storage_of.get(root) in joint.stays:
                    remade = remade and joint.maker[root].id not in done
                if root.op != "get_attr" and root not in joint.inputs[1] and not remade:
                    crossing[root] = None

    for op in after:
        again = op.id in done or op.id in made
        read(op.when_again.get(node, node) if again else node for node in op.node.all_input_nodes)
        made.add(op.id)
    read(joint.outputs[1])
    return list(crossing)


@dataclass
class _Half:
    """A graph under construction, and where in it the current value of each original node is."""

    joint: Joint
    graph: fx.Graph
    replay: Replay
    replayed: set[str]
    at: dict[fx.Node, fx.Node] = field(default_factory=dict)
    states: dict[str, fx.Node] = field(default_factory=dict)
    views: dict[int, list[fx.Node]] = field(default_factory=dict)
    """The folded nodes in ``at``, by the storages that they are made from."""
    kernels: int = 0
    """How many ops have run that a compiler fuses with nothing."""

    def take(self, nodes: Sequence[fx.Node]) -> None:
        """Inputs of this half."""
        for node in nodes:
            self.at[node] = self.graph.placeholder(node.name)
            self.at[node].meta.update(node.meta)

    def run(self, ops: Sequence[JointOp], done: set[str]) -> None:
        """Run these ops in order; ``done`` ran before, and grows."""
        for op in ops:
            self._run(op, again=op.id in done)
            self.kernels += not is_fused_kernel(op)
            done.add(op.id)

    def close(self, outputs: Sequence[Any], states: Sequence[fx.Node]) -> fx.GraphModule:
        """The finished module."""
        self.graph.output((*(self._value(node) if isinstance(node, fx.Node) else node for node in outputs), *states))
        for node in reversed(self.graph.nodes):
            if node.target is operator.getitem and not node.users:
                self.graph.erase_node(node)
        return fx.GraphModule(self.joint.module, self.graph)

    def _value(self, node: fx.Node) -> fx.Node:
        """The current value of an original node; views and constants are made when they are first asked for."""
        if node not in self.at:
            self.at[node] = self.graph.node_copy(node, self._value)
            keep_place(self.at[node], self.kernels)
            for root in self.joint.roots[node]:
                self.views.setdefault(self.joint.storage_of.get(root, -1), []).append(node)
        return self.at[node]

    def _own_value(self, node: fx.Node, own: dict[fx.Node, fx.Node]) -> fx.Node:
        """The same, with what is folded made for one reader alone: a compiler may write down what several share."""
        if node not in self.joint.folded:
            return self._value(node)
        if node not in own:
            own[node] = self.graph.node_copy(node, lambda other: self._own_value(other, own))
        return own[node]

    def _run(self, op: JointOp, again: bool) -> None:
        fused = is_fused_kernel(op)
        apart = fused and (again or op.node.target == torch.ops.aten.cat.default)  # a part is copied when it is needed
        own: dict[fx.Node, fx.Node] = {}

        def read(node: fx.Node) -> fx.Node:
            node = op.when_again.get(node, node) if again else node
            return self._own_value(node, own) if apart else self._value(node)

        random = op.id in self.replayed or (op.random and self.replay.once is not None)
        result = self._run_random(op, read) if random else self.graph.node_copy(op.node, read)
        for made in (*own.values(), result):
            keep_place(made, self.kernels, fixed=again or apart, own_kernel=not fused)
        parts = [user for user in op.node.users if user.target is operator.getitem and user in self.joint.maker]
        keep = self.joint.stays if again else set()
        self._forget_views(op, keep)
        if self.joint.storage_of.get(op.node) not in keep or parts:
            self.at[op.node] = result
        for part in parts:
            if self.joint.storage_of.get(part) not in keep and not (again and part in op.when_again.values()):
                self.at[part] = self.graph.call_function(operator.getitem, (result, part.args[1]))
                self.at[part].meta.update(part.meta)

    def _run_random(self, op: JointOp, read: Any) -> fx.Node:
        """Through :mod:`recoup.torch.rng`, with the generator's state beside the first of several results."""
        target: Any = op.node.target
        args, kwargs = fx.map_arg(op.node.args, read), fx.map_arg(op.node.kwargs, read)
        if op.id not in self.replayed:
            result = self.graph.call_function(self.replay.once, (target, *args), kwargs)  # type: ignore[arg-type]
        elif op.id in self.states:
            result = self.graph.call_function(self.replay.again, (self.states[op.id], target, *args), kwargs)
        else:
            both = self.graph.call_function(self.replay.first, (target, *args), kwargs)
            self.states[op.id] = self.graph.call_function(operator.getitem, (both, 0))
            self.states[op.id].meta["val"] = _fake_state(op.node)
            result = self.graph.call_function(operator.getitem, (both, 1))
        result.meta.update(op.node.meta)
        return result

    def _forget_views(self, op: JointOp, keep: set[int]) -> None:
        """What was made from this op's earlier results holds on to them."""
        for storage in set(op.writes) - keep:
            for view in self.views.pop(storage, ()):
                self.at.pop(view, None)


def _fake_state(node: fx.Node) -> torch.Tensor:
    """A description of a generator's state, for AOTAutograd, which wants one for everything that is saved."""
    tensor: Any = tensors_of(node.meta["val"])[0]
    with tensor.fake_mode:
        return torch.empty(CPU_STATE_BYTES if tensor.device.type == "cpu" else 16, dtype=torch.uint8, device="cpu")
