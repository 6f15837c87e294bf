"""What recoup asks of AOTAutograd: a step as one graph, and what the nodes of that graph are."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.graph import _BoxedCodeGen

from recoup.errors import RecoupWarning
from recoup.torch.internals.operators import SMOOTH, plain_operators

UNTRACEABLE = (DataDependentOutputException, DynamicOutputShapeException)  # what depends on numbers in a tensor
RUN_AND_SAVE_STATE = rng_prims.run_and_save_rng_state  # (op, *args): the generator's state before, and the result
RUN_WITH_STATE = rng_prims.run_with_rng_state  # (state, op, *args): the result; both for the current device
Partition = Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule] | None]


def compile_joint(
    module: fx.GraphModule, args: Sequence[Any], partition: Partition, for_gpu: bool = False
) -> Callable[..., Any]:
    """Trace forward and backward of ``module`` into one ATen graph, split it with ``partition``, and join the halves.

    AOTAutograd at the concrete shapes of ``args``: functionalized, with input mutations applied after the forward. The
    halves run as boxed fx code; so does the whole where nothing needs a gradient.
    """

    def split(joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        operators.close()  # planning may take a while, and other threads see these operators
        return partition(joint, num_fwd_outputs)

    def run(gm: fx.GraphModule, example_inputs: Any) -> Any:
        return boxed(gm)

    def run_backward(gm: fx.GraphModule, example_inputs: Any) -> Any:
        return _warning_if_retained(boxed(gm))

    context = TracingContext.try_get() or TracingContext(detect_fake_mode(args) or FakeTensorMode())
    with compile_lock, tracing(context), ExitStack() as operators:
        operators.enter_context(plain_operators(for_gpu))
        function = aot_module_simplified(
            module, list(args), fw_compiler=run, bw_compiler=run_backward, partition_fn=split
        )
    if context.fw_metadata is not None and context.fw_metadata.bw_donated_idxs:
        context.fw_metadata.bw_donated_idxs.clear()  # nothing writes over what is saved, so backwards may be repeated
    return torch._dynamo.disable(function, reason="recoup runs this graph by its plan")


def _warning_if_retained(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward, which tells where autograd holds on to what was saved for it until another one."""

    def run(args: list[Any]) -> Any:
        if torch._C._autograd._get_current_graph_task_keep_graph():
            warnings.warn(
                "backward(retain_graph=True) keeps what the plan frees, so that the step may take more than its "
                "budget: several losses need but one backward of their sum",
                RecoupWarning,
                stacklevel=2,
            )
        return backward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def boxed(module: fx.GraphModule) -> Callable[..., Any]:
    """The module as a function of one list, which it empties: each argument dies at its last use, not at the end."""
    graph = module.graph
    graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    forward = module.forward
    forward.__func__._boxed_call = True  # type: ignore[attr-defined]
    return forward


def argument(node: fx.Node) -> int | None:
    """The position of the caller's argument behind an input of a joint graph, from AOTAutograd's description.

    None for what is no argument: a token that orders effects, a base that several arguments are views of.
    """
    described = node.meta.get("desc")
    return described.idx if isinstance(described, PlainAOTInput) else None


def mutated_inputs(joint: fx.GraphModule) -> set[fx.Node]:
    """Which inputs are overwritten after the forward, from AOTAutograd's description of the outputs."""
    return {node for _, node in _described(joint, "mutated_input")}


def gradients(joint: fx.GraphModule) -> list[tuple[int, fx.Node]]:
    """Where among a joint graph's outputs gradients are, and the inputs that they belong to."""
    return _described(joint, "grad_of")


def _described(joint: fx.GraphModule, what: str) -> list[tuple[int, fx.Node]]:
    inputs = {node.meta["desc"]: node for node in joint.graph.find_nodes(op="placeholder") if "desc" in node.meta}
    outputs = enumerate(output_node(joint.graph).meta.get("desc") or ())
    found = [(position, inputs.get(getattr(described, what, None))) for position, described in outputs]
    return [(position, node) for position, node in found if node is not None]


def is_of_forward(node: fx.Node) -> bool:
    """Whether the node was there when AOTAutograd had traced the forward, and began with the backward."""
    return bool(node.meta.get("partitioner_tag") == "is_forward")


def call_on(graph: fx.Graph, target: Any, node: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    """A call of an operator on the node and others, described as the node is.

    Added later, it says nothing about where the forward's trace ends.
    """
    made = graph.call_function(target, (node, *args), kwargs)
    made.meta.update(node.meta)
    made.meta.pop("partitioner_tag", None)
    given = fx.map_arg(args, lambda other: other.meta["val"])
    with node.meta["val"].fake_mode:
        made.meta["val"] = target(node.meta["val"], *given, **kwargs)
    return made


def is_of_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd says that the node is to run in the backward: a write to an input there."""
    return bool(node.meta.get("partitioner_tag") == "must_be_in_backward")


def written_input(node: fx.Node) -> fx.Node | None:
    """The input that this node overwrites: Inductor keeps input mutations in the graph, as copies at its end."""
    if node.target == torch.ops.aten.copy_.default and isinstance(node.args[0], fx.Node):
        return node.args[0] if node.args[0].op == "placeholder" else None
    return None


def output_node(graph: fx.Graph) -> fx.Node:
    """The one output node of a graph."""
    return next(iter(graph.find_nodes(op="output")))


def is_random(node: fx.Node) -> bool:
    """Whether the node draws from the generator (dropout does only with a probability, and so does attention)."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    probability = "p" if "dropout" in _packet_name(node) else "dropout_p"
    for position, expected in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if expected.name == probability:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(probability, 0.0)
            return bool(given != 0.0)
    return True


def is_once(node: fx.Node) -> bool:
    """Whether the node must not run again: communication, effects, anything that is not a pure function.

    Nor may the seeds of Inductor's random numbers, which are drawn for the whole step in one op without inputs.
    """
    target = node.target
    if target is operator.getitem:
        return False
    if _packet_name(node) in ("inductor_seeds", "inductor_rand_eager_offsets"):
        return True
    if communicates(node):
        return True
    schema = getattr(target, "_schema", None)
    return schema is None or schema.is_mutable or _differs_each_time(node)


def communicates(node: fx.Node) -> bool:
    """Whether the node waits for other processes, which must all run it equally often."""
    return getattr(node.target, "namespace", "") in COLLECTIVES


def _differs_each_time(node: fx.Node) -> bool:
    """Whether a second run may differ: ops that add with atomics on CUDA, or choose among equals by chance."""
    value = node.meta.get("val")
    made = value if isinstance(value, tuple | list) else (value,)
    on_cuda = any(isinstance(one, torch.Tensor) and one.device.type == "cuda" for one in made)
    return on_cuda and _packet_name(node) in NONDETERMINISTIC


def _packet_name(node: fx.Node) -> str:
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))


COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem")
_NONDETERMINISTIC_BACKWARD = (
    *SMOOTH,
    *(f"_upsample_{kind}2d_aa" for kind in ("bilinear", "bicubic", "lanczos")),
    *("grid_sampler_2d", "grid_sampler_3d", "_ctc_loss"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "avg_pool3d", "max_pool3d_with_indices"),
    *("adaptive_max_pool3d", "fractional_max_pool2d", "fractional_max_pool3d"),
    *("_embedding_bag", "_embedding_bag_dense"),
    *(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    *("_flash_attention", "_efficient_attention", "_cudnn_attention"),
    *(f"{kind}_pad{sides}d" for kind in ("reflection", "replication") for sides in (1, 2, 3)),
)
NONDETERMINISTIC = {
    *("scatter_add", "scatter_reduce", "index_add", "index_reduce", "index_put", "_unsafe_index_put", "put", "cumsum"),
    *("nll_loss2d_forward", "bincount", "median", "nanmedian", "max_unpool2d", "max_unpool3d"),
    *(f"{name}_backward" for name in _NONDETERMINISTIC_BACKWARD),
}
_CUDNN = ({"Cudnn", "CudnnTranspose"},)
_ONEDNN = ({"Mkldnn", "MkldnnTranspose"}, {"Mkldnn", "???"})  # the transposed one has no name yet


def are_one_kernel(one: tuple[Any, ...], other: tuple[Any, ...], nearly: bool) -> bool:
    """Whether of two convolutions, one of them transposed, each is the gradient of the other's input.

    Each is given by the arguments of ``aten.convolution``. cuDNN runs the same kernel for both. oneDNN most often does,
    and ``nearly`` takes that for good enough; PyTorch's own kernels are others.
    """
    chosen = {torch._C._select_conv_backend(*args, None).name for args in (one, other)}
    return chosen in (_CUDNN + _ONEDNN if nearly else _CUDNN)
