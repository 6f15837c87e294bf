"""Every touch of PyTorch that is not public. Nothing else in recoup imports a ``torch._`` module.

Each function says which upstream behaviour it stands on; the tests run on the oldest and the newest supported torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import _disable_current_modes

Partition = Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule]]


def compile_dynamo(function: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile``, except that running out of recompilations raises instead of running the plain function.

    Dynamo's answer to the limit is to run eagerly, which would break the budget without a word.
    """
    compiled = torch.compile(function, backend=backend)
    strict = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        with strict:
            return compiled(*args, **kwargs)

    return call


def graph_break(module: fx.GraphModule) -> str | None:
    """Where and why Dynamo ended this part of the program early, or None if it did not."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    where = f" at {reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno}" if reason.user_stack else ""
    return f"{str(reason.reason).splitlines()[0]}{where}"


def compile_joint(
    module: fx.GraphModule, args: Sequence[Any], partition: Partition, plain: Callable[[fx.GraphModule], Any]
) -> Callable[..., Any]:
    """Trace forward and backward of ``module`` into one ATen graph, split it with ``partition``, and join the halves.

    AOTAutograd at the concrete shapes of ``args``: functionalized, with input mutations applied after the forward. The
    halves run as boxed fx code. Where nothing needs a gradient, ``plain`` makes the callable.
    """

    def split(joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        return partition(joint, num_fwd_outputs)

    def run(half: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        return boxed(half)

    def infer(whole: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        return boxed(plain(whole))

    return torch._dynamo.disable(
        aot_module_simplified(
            module, list(args), fw_compiler=run, bw_compiler=run, inference_compiler=infer, partition_fn=split
        ),
        reason="recoup runs this graph by its plan",
    )


def boxed(module: fx.GraphModule) -> Callable[..., Any]:
    """The module as a function of one list, which it empties: each argument dies at its last use, not at the end."""
    graph = module.graph
    graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    forward = module.forward
    forward.__func__._boxed_call = True  # type: ignore[attr-defined]
    return forward


@contextmanager
def real_tensors(device: torch.device) -> Iterator[None]:
    """Leave fake-tensor, proxy and autocast modes, and keep the random state, to run operators while tracing."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableAutocast())  # type: ignore[no-untyped-call]
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"))
        yield


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor only describes one."""
    return isinstance(tensor, FakeTensor)


def storage_key(tensor: torch.Tensor) -> int:
    """The same for two tensors exactly if they share a storage (also for the fake tensors of a traced graph)."""
    return int(tensor.untyped_storage()._cdata)


def mutated_inputs(joint: fx.GraphModule) -> set[int]:
    """Which inputs (by position) are overwritten after the forward, from AOTAutograd's description of the outputs."""
    described = output_node(joint.graph).meta.get("desc") or ()
    return {
        desc.mutated_input.idx
        for desc in described
        if hasattr(desc, "mutated_input") and hasattr(desc.mutated_input, "idx")
    }


def output_node(graph: fx.Graph) -> fx.Node:
    """The one output node of a graph."""
    return next(iter(graph.find_nodes(op="output")))


def is_random(node: fx.Node) -> bool:
    """Whether the node draws from the generator (attention does only with dropout)."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name in ("dropout_p", "p"):
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, 0.0)
            return given != 0.0
    return True


def is_once(node: fx.Node) -> bool:
    """Whether the node must not run again: communication, effects, anything that is not a pure function."""
    target = node.target
    if target is operator.getitem:
        return False
    namespace = getattr(target, "namespace", "")
    if namespace in ("_c10d_functional", "c10d_functional", "c10d", "_dtensor", "symm_mem"):
        return True
    schema = getattr(target, "_schema", None)
    return schema is None or schema.is_mutable


def tracing_context() -> TracingContext | None:
    """What Dynamo is tracing right now."""
    return TracingContext.try_get()
