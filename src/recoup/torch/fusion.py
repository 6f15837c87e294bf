"""What a compiled step computes without ever writing it down, and what its fused kernels cost.

Inductor computes pointwise operators inside the kernel that reads them. So a value exists only if something that is no
fused kernel reads it (a convolution, a matrix product, attention), if the step returns it, if it is a reduction's
result, or if inlining it further would read too much. Everything else is folded into its readers: it costs no kernel,
it holds no memory, and the backward computes it again for free from what it reads anyway.

A fused kernel costs the bytes that it reads and writes. Only forward kernels are ever run again, so these decide.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import fx

from recoup.torch.costs import Cost, signature, tensors_of
from recoup.torch.estimate import Rates
from recoup.torch.internals.graphs import written_input
from recoup.torch.internals.inductor import gathers, is_fusible, is_generated, is_spread_inside, may_overwrite, spreads
from recoup.torch.internals.tensors import storage_key
from recoup.torch.joint import Joint, JointOp, from_tangents

READS = 4  # Inductor writes a value that several kernels use once computing it reads more than this many buffers
KERNEL_SECONDS = 2e-6  # what a kernel takes besides moving its bytes
LARGE = 2**16  # bytes; smaller values are statistics and masks of single dimensions, which cost nothing to read


def folded_nodes(module: fx.GraphModule, channels_last: bool = False) -> set[fx.Node]:
    """The nodes of a joint graph that Inductor computes inside their readers.

    ``channels_last`` says that it lays out so what convolutions read and write, and so what is in between.
    """
    in_backward = from_tangents(module.graph)
    overwritten = {written_input(node) for node in module.graph.nodes} - {None}
    written = _read_by_other_kernels(module.graph)
    folded: set[fx.Node] = set()
    reads: dict[fx.Node, set[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        read = set().union(*(reads[other] for other in node.all_input_nodes))
        large = sum(node_bytes(other) >= LARGE for other in read)
        reused = large >= (READS + 1 if node in in_backward else 2) and _is_reused(node)
        if is_view(node):
            inside = any(other in folded for other in node.all_input_nodes)
            reads[node] = read
            if not overwritten.isdisjoint(node.all_input_nodes):
                overwritten.add(node)
        else:
            inside = is_fusible(node) and not is_generated(node)
            inside = node.op == "call_function" and (inside or is_spread_inside(node, channels_last))
            inside = inside and node not in written and not reused
            inside = inside and not (len(read) > 1 and _is_read_often(node))
            inside = inside and overwritten.isdisjoint(node.all_input_nodes)  # the backward would read it changed
            reads[node] = read if inside else {node}
        if inside:
            folded.add(node)
    return folded


def fused_costs(joint: Joint, measured: Mapping[str, Cost], rates: Rates) -> dict[str, Cost]:
    """The cost of each op by its id: kernels of their own as measured, fused ones by the bytes they move."""
    return {op.id: _cost(joint, op, measured, rates) for op in joint.ops}


def is_fused_kernel(op: JointOp) -> bool:
    """Whether the op is code that Inductor generates rather than a kernel from a library."""
    return is_fusible(op.node) or is_generated(op.node)


def _cost(joint: Joint, op: JointOp, measured: Mapping[str, Cost], rates: Rates) -> Cost:
    if not is_fused_kernel(op):
        alone = measured[signature(op.node)]
        return replace(alone, workspace=alone.workspace + _copied(op.node))
    moved = sum(joint.storages[storage].bytes for storage in (*op.reads, *op.writes))
    return Cost(KERNEL_SECONDS + moved / rates.bytes_per_second, in_place=may_overwrite(op.node))


def _copied(node: fx.Node) -> int:
    """Bytes of the parts of larger tensors that a convolution reads: Inductor copies them into the layout it wants."""
    if "convolution" not in str(node.target):
        return 0
    given = tensors_of([other.meta.get("val") for other in node.all_input_nodes])
    whole = [(int(tensor.numel() * tensor.element_size()), int(tensor.untyped_storage().nbytes())) for tensor in given]
    return sum(size for size, storage in whole if LARGE <= size < storage)


def _read_by_other_kernels(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that a library kernel, a write to an input or the caller reads: through views too, they are in memory."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        inside = is_view(node) or ((is_fusible(node) or is_generated(node)) and written_input(node) is None)
        if node.op not in ("call_function", "output") or inside:
            continue
        stack = list(node.all_input_nodes)
        while stack:
            other = stack.pop()
            if other not in found:
                found.add(other)
                stack.extend(other.all_input_nodes if is_view(other) else ())
    return found


def _is_reused(node: fx.Node) -> bool:
    """Whether several nodes read it, if only through views."""
    return next(itertools.islice(readers(node), 1, None), None) is not None


def _is_read_often(node: fx.Node) -> bool:
    """Whether all that read the node do so several times, or the backward of a pool spreads it.

    Then Inductor has it written if it is computed from more than one tensor.
    """
    found = list(readers(node))
    spread = any(spreads(reader) and reader.args[0] is read for reader, read in found)
    return spread or (bool(found) and all(gathers(reader) for reader, _ in found))


def is_view(node: fx.Node) -> bool:
    """Whether the node makes no storage of its own."""
    made, given = (
        tensors_of(node.meta.get("val")),
        tensors_of([other.meta.get("val") for other in node.all_input_nodes]),
    )
    known = {storage_key(tensor) for tensor in given}
    makes_none = bool(made) and all(storage_key(tensor) in known for tensor in made)
    return node.op == "call_function" and makes_none and written_input(node) is None


def readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What reads the node, if only through views, and as which of them."""
    for user in node.users:
        if is_view(user):
            yield from readers(user)
        else:
            yield user, node


def node_bytes(node: fx.Node) -> int:
    """Of the largest tensor that the node makes."""
    return max((int(tensor.numel() * tensor.element_size()) for tensor in tensors_of(node.meta.get("val"))), default=0)
