"""From layers to a training step: forward ops, a loss, backward ops in reverse.

Each layer says what its backward op reads again: its inputs, its output, a stash made for the purpose, or nothing. A
backward op reads the gradients that the layer's readers sent and sends one to each of its inputs; where several
arrive they are summed inside the op. A layer that only passes its gradient on (an addition) has no backward op unless
there is something to sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from recoup.builder import GraphBuilder
from recoup.errors import GraphError
from recoup.graph import Graph

INPUT = "input"  # what the first layers read: the data, resident


@dataclass(frozen=True)
class Layer:
    """A layer of a network: a forward op and the backward op that belongs to it."""

    id: str
    inputs: tuple[str, ...]  # ids of layers, or INPUT
    bytes: int
    time: float
    backward_time: float
    keeps_inputs: bool = True  # backward reads the inputs
    keeps_output: bool = False  # backward reads the output
    stash: int = 0  # bytes of a second output, for backward alone
    passes_gradient: bool = False  # backward hands on what it gets
    workspace: int = 0
    backward_workspace: int = 0
    name: str = ""


def training_graph(
    name: str,
    layers: Sequence[Layer],
    *,
    input_bytes: int = 0,
    fixed_bytes: int = 0,
    loss_time: float = 1,
    time_unit: str = "unit",
    keep_input_gradient: bool = False,
) -> Graph:
    """The training step of a network whose last layer feeds the loss.

    ``input_bytes`` scale with the batch, ``fixed_bytes`` (parameters and their gradients) do not. With
    ``keep_input_gradient`` the step also computes the gradient of the data, and its result is a required output.
    """
    if not layers:
        raise GraphError(f"{name}: a network has at least one layer")
    b = GraphBuilder(
        name,
        time_unit=time_unit,
        resident_bytes=fixed_bytes + input_bytes,
        resident_scaling_bytes=input_bytes,
    )
    size = {INPUT: input_bytes} | {layer.id: layer.bytes for layer in layers}
    activation = {INPUT: b.input("x", input_bytes)}
    for layer in layers:
        outputs = {f"a.{layer.id}": layer.bytes}
        if layer.stash:
            outputs[f"s.{layer.id}"] = layer.stash
        reads = [activation[i] for i in layer.inputs]
        activation[layer.id] = f"a.{layer.id}"
        b.op(layer.id, inputs=reads, outputs=outputs, time=layer.time, workspace=layer.workspace, name=layer.name)
    last = layers[-1]
    arriving: dict[str, list[str]] = defaultdict(list)
    arriving[last.id] += b.op(
        "loss", inputs=[activation[last.id]], outputs={"g.loss": last.bytes}, time=loss_time, name="loss"
    )
    for layer in reversed(layers):
        gradients = arriving[layer.id]
        if not gradients:
            continue  # nobody's loss depends on it
        targets = [i for i in dict.fromkeys(layer.inputs) if i != INPUT or keep_input_gradient]
        if layer.passes_gradient and len(gradients) == 1:
            for target in targets:
                arriving[target] += gradients
            continue
        reads = list(gradients)
        reads += [activation[i] for i in layer.inputs] if layer.keeps_inputs else []
        reads += [activation[layer.id]] if layer.keeps_output else []
        reads += [f"s.{layer.id}"] if layer.stash else []
        if layer.passes_gradient:
            outputs = {f"g.{layer.id}": layer.bytes}
        else:
            outputs = {f"g.{target}.{layer.id}": size[target] for target in targets}
        made = b.op(
            f"{layer.id}.backward",
            inputs=reads,
            outputs=outputs,
            time=layer.backward_time,
            workspace=layer.backward_workspace,
            name=f"{layer.name}.backward" if layer.name else "",
            phase="backward",
        )
        for position, target in enumerate(targets):
            arriving[target].append(made[0 if layer.passes_gradient else position])
    return b.build(outputs=arriving[INPUT] if keep_input_gradient else [])
