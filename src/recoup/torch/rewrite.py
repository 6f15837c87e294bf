"""Changes to the captured graph before planning that leave every number as the plain step computes it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from recoup.torch.costs import tensors_of
from recoup.torch.fusion import LARGE, is_view, node_bytes, readers
from recoup.torch.internals.graphs import are_one_kernel, argument, call_on, gradients, output_node
from recoup.torch.internals.inductor import gathers, is_fusible, is_generated, kept_copy, reads_shape_only
from recoup.torch.joint import from_tangents

aten = torch.ops.aten


def split_convolutions(module: fx.GraphModule, nearly: bool = False, channels_last: bool = False) -> None:
    """Take each convolution's backward apart, so that its input is gone before the input's gradient is made.

    ``nearly`` lets a CPU round otherwise; ``channels_last`` says that convolutions will be laid out so.
    """
    for node in module.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        _split_convolution_backward(module.graph, node, nearly, channels_last)
    module.recompile()


def use_best_batch_norm(module: fx.GraphModule) -> None:
    """Batch norm with the kernel that plain PyTorch chooses on CUDA."""
    for node in module.graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_functional.default):
        if node.args[0].meta["val"].device.type == "cuda":
            _use_cudnn_batch_norm(module.graph, node)
    module.recompile()


def order_products(module: fx.GraphModule) -> None:
    """Of the two matrix products in a linear layer's backward, run first the one that leaves more to be freed.

    Autograd has them in either order. Where the weight is a vocabulary, its gradient had better wait until the weight's
    cast is gone; in most other layers the input's gradient had better wait until the layer's input is.
    """
    in_backward = from_tangents(module.graph)
    position = {node: number for number, node in enumerate(module.graph.nodes)}
    products = module.graph.find_nodes(op="call_function", target=aten.mm.default)
    moved: fx.Node | None = None
    for first, second in itertools.pairwise(node for node in products if node in in_backward):
        reads = {node: set(map(_source, node.all_input_nodes)) for node in (first, second)}
        if first is moved or reads[first].isdisjoint(reads[second]) or first in reads[second]:
            continue
        over = {node for node in reads[first] | reads[second] if _last_use(node, position) <= position[second]}
        as_it_is = _held(reads[first], reads[second], first, second, over)
        if _held(reads[second], reads[first], second, first, over) < as_it_is:
            _move_before(first, second, position)
            moved = second
    module.recompile()


def copy_parts(module: fx.GraphModule) -> None:
    """Copy what is concatenated, or pooled, and read elsewhere, too.

    Inductor would make it inside of the concatenation, and a part that is needed for longer, or from earlier on, would
    keep the whole for as long. What is pooled Inductor writes down, others compute it inside of what reads it.
    """
    for node in module.graph.nodes:
        with module.graph.inserting_before(node):
            if node.target == aten.cat.default:
                node.args = ([_copied_part(part, part) for part in node.args[0]], *node.args[1:])
            elif gathers(node):
                node.args = (_copied_part(node.args[0], _source(node.args[0])), *node.args[1:])
    module.recompile()


def forget_pooled(module: fx.GraphModule, channels_last: bool) -> None:
    """Give the backward of a pool a constant, of which Inductor reads nothing but the shape, for what was pooled.

    What no kernel reads Inductor does not free before the backward ends.
    """
    for node in module.graph.nodes:
        if reads_shape_only(node, channels_last):
            pooled: Any = node.args[1].meta["val"]
            given, described = (list(pooled.shape), 0), {"dtype": pooled.dtype, "device": pooled.device}
            with module.graph.inserting_before(node), pooled.fake_mode:
                shape = module.graph.call_function(aten.full.default, given, described)
                shape.meta["val"] = aten.full.default(*given, **described)
            node.args = (node.args[0], shape, *node.args[2:])
    module.recompile()


def _copied_part(part: fx.Node, source: fx.Node) -> fx.Node:
    """A copy, if Inductor would generate the source of the part inside of what the part is read by."""
    return kept_copy(part) if _is_made_inside(source) else part


def _is_made_inside(part: fx.Node) -> bool:
    """Whether Inductor would generate it inside of what it is a part of, for other readers as well.

    Of numbers that are no floats there are few, and some have no maximum.
    """
    generated = (is_fusible(part) or is_generated(part)) and not is_view(part)
    is_float = generated and tensors_of(part.meta.get("val"))[0].is_floating_point()
    return is_float and len(part.users) > 1 and node_bytes(part) >= LARGE


def are_leaves(args: Sequence[Any]) -> list[bool]:
    """Which arguments of a step autograd keeps a gradient of, as of a parameter."""
    return [isinstance(arg, torch.Tensor) and arg.is_leaf for arg in args]


def copy_gradients(module: fx.GraphModule, num_forward_outputs: int, leaves: list[bool]) -> None:
    """Copy the gradients that autograd copies before it keeps them as a parameter's, so that the plan counts the copy.

    Autograd keeps what it is given if nobody else holds it and it lies in memory as the parameter does. A slice of a
    larger gradient, a transposed or an expanded one does not; two parameters cannot keep the same. ``leaves`` says
    which of the caller's arguments are parameters.
    """
    graph = module.graph
    output = output_node(graph)
    returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    held = {*returned[:num_forward_outputs], *graph.find_nodes(op="placeholder")}
    for index, parameter in gradients(module):
        gradient, position = returned[index], argument(parameter)
        if isinstance(gradient, fx.Node) and (position is None or leaves[position]):
            if gradient in held or not _lies_like(gradient.meta["val"], parameter.meta["val"]):
                returned[index] = _copied(graph, output, gradient, parameter.meta["val"])
            held.add(gradient)
    output.args = (returned,)
    module.recompile()


def _lies_like(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """The condition of ``AccumulateGrad`` in PyTorch's ``accumulate_grad.h``; a sparse one is not copied."""
    if gradient.layout != torch.strided:
        return True
    strides = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    return all(mine == theirs if size != 1 else mine != 0 for size, mine, theirs in strides)


def _copied(graph: fx.Graph, output: fx.Node, gradient: fx.Node, parameter: torch.Tensor) -> fx.Node:
    """With the parameter's dimensions in the order in which they lie in memory, in that order, and back."""
    order = sorted(range(parameter.dim()), key=lambda dim: parameter.stride()[dim], reverse=True)
    back = [order.index(dim) for dim in range(parameter.dim())]
    in_order = order == back == sorted(order)
    with graph.inserting_before(output):
        node = gradient if in_order else call_on(graph, aten.permute.default, gradient, order)
        node = call_on(graph, aten.clone.default, node, memory_format=torch.contiguous_format)
        return node if in_order else call_on(graph, aten.permute.default, node, back)


def _source(node: fx.Node) -> fx.Node:
    """What a node is a view of."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _last_use(node: fx.Node, position: dict[fx.Node, int]) -> int:
    """The position of the last node that reads it, if only through views. What the step is given is never free."""
    if node.op == "placeholder":
        return len(position)
    return max((position[reader] for reader, _ in readers(node)), default=0)


def _held(reads: set[fx.Node], next_reads: set[fx.Node], one: fx.Node, other: fx.Node, over: set[fx.Node]) -> int:
    """Bytes that two nodes read and make, at most at a time, if ``one`` is the first of them; ``over`` is what nobody
    reads after both."""
    both = sum(map(node_bytes, reads | next_reads)) + node_bytes(one)
    freed = sum(map(node_bytes, (reads - next_reads) & over))
    return max(both, both - freed + node_bytes(other))


def _move_before(first: fx.Node, second: fx.Node, position: dict[fx.Node, int]) -> None:
    """With the views that it reads, if nothing else that it needs is made in between."""
    moved, stack = set(), [second]
    while stack:
        node = stack.pop()
        if position[node] > position[first]:
            moved.add(node)
            stack.extend(node.all_input_nodes)
    if all(node is second or is_view(node) for node in moved):
        for node in sorted(moved, key=position.__getitem__):
            first.prepend(node)


def _split_convolution_backward(graph: fx.Graph, node: fx.Node, nearly: bool, channels_last: bool) -> None:
    """The weight's gradient first and the input's after it, which does not read the input where it need not.

    The kernels are separate in every back end; ``output_mask`` says which of them run.
    """
    mask = list(node.args[10])  # type: ignore[arg-type]
    parts = {user.args[1]: user for user in node.users}
    for_input = parts.pop(0, None)
    if for_input is None:
        return
    with graph.inserting_before(node):
        back = _convolution_back(graph, node, nearly)
        if back is None and not parts:
            return
        kernel = back or _masked(graph, node, [True, False, False])
        _replace(for_input, back or graph.call_function(operator.getitem, (kernel, 0)))
    if parts:
        with graph.inserting_before(kernel):
            for_weight = _masked(graph, node, [False, mask[1], mask[2]])
        _copy_gradient(graph, (for_weight, kernel), channels_last)
    for index, part in parts.items():
        with graph.inserting_before(part):
            _replace(part, graph.call_function(operator.getitem, (for_weight, index)))
    graph.erase_node(node)


def _copy_gradient(graph: fx.Graph, kernels: tuple[fx.Node, fx.Node], channels_last: bool) -> None:
    """Copy, once for both kernels, what each would copy for itself: a gradient that is a slice of another one, or that
    comes from outside and is to be laid out anew.

    A bias's gradient is summed up without, and not to be rounded otherwise.
    """
    for_weight, for_input = kernels
    gradient: Any = for_weight.args[0]
    fake, wanted = gradient.meta["val"], tensors_of(for_input.meta["val"])[0]
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(wanted.dim())
    is_last = last is not None and wanted.is_contiguous(memory_format=last) and not wanted.is_contiguous()
    is_last = is_last or (channels_last and wanted.dim() == 4)  # Inductor lays out no others anew
    layout = last if is_last else torch.contiguous_format
    from_outside = gradient.op == "placeholder" and not fake.is_contiguous(memory_format=layout)
    if for_weight.args[10][2] or (_lies_densely(fake) and not from_outside):  # type: ignore[index]
        return
    with graph.inserting_before(for_weight):
        copied = call_on(graph, aten.clone.default, gradient, memory_format=layout)
    for kernel in kernels:
        kernel.update_arg(0, copied)


def _lies_densely(tensor: torch.Tensor) -> bool:
    """Whether a tensor that does not overlap itself is all there is between its first and its last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return not tensor.numel() or 1 + sum((size - 1) * stride for size, stride in steps) == tensor.numel()


def _convolution_back(graph: fx.Graph, node: fx.Node, nearly: bool) -> fx.Node | None:
    """The gradient of a convolution's input as the convolution the other way; None where that is another kernel.

    A convolution's backward is handed the input for its shape alone: a kernel that does not read it lets it go.
    """
    gradient, x, weight, _, stride, padding, dilation, transposed, padded, groups, _ = node.args
    fake, given, kernel = (arg.meta["val"] for arg in (gradient, x, weight))  # type: ignore[union-attr]
    steps = tuple(zip(given.shape[2:], fake.shape[2:], kernel.shape[2:], stride, padding, dilation, strict=False))  # type: ignore[arg-type]
    if not len(steps) == given.dim() - 2 == kernel.dim() - 2 == len(padded) or not (fake.numel() and given.numel()):  # type: ignore[arg-type]
        return None
    rest = [size - ((out - 1) * by - 2 * pad + wide * (k - 1) + 1) for size, out, k, by, pad, wide in steps]
    back = (None, stride, padding, dilation, not transposed, [0] * len(rest) if transposed else rest, groups)
    there = (None, stride, padding, dilation, transposed, padded, groups)
    if not are_one_kernel((given, kernel, *there), (fake, kernel, *back), nearly):
        return None
    wanted = node.meta["val"][0]
    with fake.fake_mode:
        found = aten.convolution.default(fake, kernel, *back)
    if (found.shape, found.stride()) != (wanted.shape, wanted.stride()):
        return None
    return graph.call_function(aten.convolution.default, (gradient, weight, *back))  # type: ignore[arg-type]


def _replace(part: fx.Node, fresh: fx.Node) -> None:
    fresh.meta.update(part.meta)
    part.replace_all_uses_with(fresh)
    part.graph.erase_node(part)


def _masked(graph: fx.Graph, node: fx.Node, mask: list[bool]) -> fx.Node:
    part = graph.call_function(node.target, (*node.args[:10], mask), dict(node.kwargs))  # type: ignore[arg-type]
    part.meta.update(node.meta)
    part.meta["val"] = tuple(value if keep else None for value, keep in zip(node.meta["val"], mask, strict=True))
    return part


def _use_cudnn_batch_norm(graph: fx.Graph, node: fx.Node) -> None:
    """The functional form that AOTAutograd traces is the native kernel, three times slower than what plain PyTorch
    runs; ``_batch_norm_with_update`` chooses like plain PyTorch and hands the backward what cuDNN wants to keep."""
    x, weight, bias, mean, variance, training, momentum, eps = node.args
    if training is not True or not all(isinstance(arg, fx.Node) for arg in (weight, bias, mean, variance)):
        return
    parts = {user.args[1]: user for user in node.users}
    backwards = {
        user
        for index in (1, 2)
        if index in parts
        for user in parts[index].users
        if user.target == aten.native_batch_norm_backward.default
    }
    fake = x.meta["val"]  # type: ignore[union-attr]
    with graph.inserting_before(node):
        args = (x, weight, bias, mean, variance, momentum, eps)
        fresh = graph.call_function(aten._batch_norm_with_update_functional.default, args)
        fresh.meta.update(node.meta)
        values = node.meta["val"]
        with fake.fake_mode:
            reserve = torch.empty(0, dtype=torch.uint8, device=fake.device)
        fresh.meta["val"] = (values[0], values[1], values[2], reserve, values[3], values[4])
        kept = graph.call_function(operator.getitem, (fresh, 3))
        kept.meta["val"] = reserve
        for index, place in enumerate((0, 1, 2, 4, 5)):
            if index in parts:
                new = graph.call_function(operator.getitem, (fresh, place))
                new.meta.update(parts[index].meta)
                parts[index].replace_all_uses_with(new)
                graph.erase_node(parts[index])
    graph.erase_node(node)
    for backward in backwards:
        grad, x_, weight_, mean_, variance_, save_mean, save_rstd, train, eps_, mask = backward.args
        with graph.inserting_before(backward):
            given = (grad, x_, weight_, mean_, variance_, save_mean, save_rstd, train, eps_, mask, kept)
            fresh = graph.call_function(aten.batch_norm_backward.default, given)
            fresh.meta.update(backward.meta)
        backward.replace_all_uses_with(fresh)
        graph.erase_node(backward)
