"""The planner's graph of a captured step: ops with their costs, storages with the bytes the allocator counts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from recoup.builder import GraphBuilder
from recoup.graph import Graph, Implementation
from recoup.torch.costs import Cost, tensors_of
from recoup.torch.joint import ARRIVAL, Joint, JointOp
from recoup.torch.memory import allocated_size, is_on

ARGUMENTS = "arguments"
LATER = "gradients of later parts"
LOSS_COPIES = 3  # that a loss outside makes of what it reads, and of its gradient: cross entropy two, a square three


def step_graph(
    joint: Joint,
    costs: Mapping[str, Cost],
    device: torch.device,
    resident: int,
    *,
    between: int = 0,
    later_gradients: int = 0,
    replay: bool = True,
) -> Graph:
    """The graph of one step with ``resident`` bytes on the device when it begins.

    ``between`` is what the rest of the program needs after this forward and before its backward, and
    ``later_gradients`` what it leaves of that for good; a loss outside is always allowed for. The gradients that arrive
    are held by autograd until the backward returns. Without ``replay``, random ops run once.
    """
    builder = GraphBuilder(time_unit="s", resident_bytes=resident)
    sizes = _sizes(joint, costs, device)
    made = {storage for op in joint.ops for storage in op.writes}
    tangents = list(dict.fromkeys(joint.storage_of[node] for node in joint.inputs[1] if node in joint.storage_of))
    overwritten = _overwritten(joint, costs, sizes)
    for index, storage in enumerate(joint.storages):
        builder.value(storage.id, sizes[index])
    left = [LATER] if later_gradients else []
    for name in left:
        builder.value(name, later_gradients)

    def ids(storages: Any) -> list[str]:
        return [joint.storages[index].id for index in storages]

    def add(op: JointOp) -> None:
        cost = costs[op.id]
        over = overwritten.get(op.id)
        pair = None if over is None else (joint.storages[over[0]].id, joint.storages[over[1]].id)
        implementation = Implementation(
            tuple(ids(op.reads)), tuple(ids(op.writes)), cost.seconds, cost.workspace, inplace=pair
        )
        builder.op(
            op.id,
            implementations=[implementation],
            name=str(op.node.target),
            phase=op.phase,
            once=op.once or (op.random and not replay),
            meta=_meta(op.node) | ({ARGUMENTS: arguments(op)} if cost.workspace else {}),
        )

    for op in joint.ops:
        if op.phase == "forward":
            add(op)
    returned = {joint.storage_of[node] for node in joint.outputs[0] if node in joint.storage_of}
    loss = LOSS_COPIES * sum(sizes[storage] for storage in tangents if sizes[storage] > 512)
    builder.op(
        ARRIVAL,
        inputs=ids(sorted(returned & made)),
        outputs=ids(tangents) + left,
        workspace=max(loss, between),
        phase="backward",
        once=True,
    )
    for op in joint.ops:
        if op.phase == "backward":
            add(op)
    return builder.build(outputs=ids(sorted((joint.stays & made) | set(tangents))) + left)


def _overwritten(joint: Joint, costs: Mapping[str, Cost], sizes: list[int]) -> dict[str, tuple[int, int]]:
    """Which input each fused kernel writes its result over: one that nothing after it reads, of the same size."""
    made = {storage for op in joint.ops for storage in op.writes} - joint.stays
    last = {storage: op.id for op in joint.ops for storage in op.reads}
    pairs: dict[str, tuple[int, int]] = {}
    for op in joint.ops:
        dying = [storage for storage in op.reads if storage in made and last[storage] == op.id]
        for read, write in product(dying if costs[op.id].in_place else (), op.writes):
            if sizes[read] == sizes[write] > 0 and write not in joint.stays:
                pairs.setdefault(op.id, (read, write))
    return pairs


def _sizes(joint: Joint, costs: Mapping[str, Cost], device: torch.device) -> list[int]:
    """Bytes of each storage on the device: as measured where that was possible, else as traced."""
    here = [is_on(storage.device, device) for storage in joint.storages]
    sizes = [storage.bytes if there else 0 for storage, there in zip(joint.storages, here, strict=True)]
    for op in joint.ops:
        measured = costs[op.id].outputs
        if measured is not None and len(measured) == len(op.writes):
            for storage, size in zip(op.writes, measured, strict=True):
                sizes[storage] = max(sizes[storage], size) if here[storage] else 0
    return [allocated_size(size, device) for size in sizes]


def arguments(op: JointOp) -> str:
    """What the op is given besides tensors: strides, dilation. Its workspace depends on them."""
    return str([str(given) for given in tree_leaves((op.node.args, op.node.kwargs)) if not isinstance(given, fx.Node)])


def _meta(node: fx.Node) -> dict[str, Any]:
    meta: dict[str, Any] = {"shapes": [list(tensor.shape) for tensor in tensors_of(node.meta.get("val"))]}
    modules = node.meta.get("nn_module_stack")
    if modules:
        meta["module"] = str(list(modules.values())[-1][0])
    return meta
