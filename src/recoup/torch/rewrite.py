"""Changes to the captured graph before planning that leave every number as the plain step computes it."""

from __future__ import annotations

import operator

import torch
from torch import fx

aten = torch.ops.aten


def split_convolutions(module: fx.GraphModule) -> None:
    """Take each convolution's backward apart, so that its input can be freed in between."""
    for node in module.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        _split_convolution_backward(module.graph, node)
    module.recompile()


def use_best_batch_norm(module: fx.GraphModule) -> None:
    """Batch norm with the kernel that plain PyTorch chooses on CUDA."""
    for node in module.graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_functional.default):
        if node.args[0].meta["val"].device.type == "cuda":
            _use_cudnn_batch_norm(module.graph, node)
    module.recompile()


def _split_convolution_backward(graph: fx.Graph, node: fx.Node) -> None:
    """The weight's gradient first and the input's after it, so that the input can go between the two.

    The kernels are separate in every back end; ``output_mask`` says which of them run.
    """
    mask = list(node.args[10])  # type: ignore[arg-type]
    if not (mask[0] and (mask[1] or mask[2])):
        return
    parts = {user.args[1]: user for user in node.users}
    with graph.inserting_before(node):
        for_weight = _masked(graph, node, [False, mask[1], mask[2]])
        for_input = _masked(graph, node, [True, False, False])
        for index, part in parts.items():
            source = for_input if index == 0 else for_weight
            fresh = graph.call_function(operator.getitem, (source, index))
            fresh.meta.update(part.meta)
            part.replace_all_uses_with(fresh)
            graph.erase_node(part)
    graph.erase_node(node)


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
