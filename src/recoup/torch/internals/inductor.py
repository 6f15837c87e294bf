"""What recoup asks of Inductor: what it fuses, and kernels that run where the plan has them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from recoup.torch.internals.graphs import Partition, call_on, is_random


@cache
def _fusible_packets() -> frozenset[Any]:
    """What PyTorch's own partitioner takes for fusible, and what Inductor's random numbers are made of."""
    prims = torch.ops.prims
    more = {prims.inductor_random, prims.inductor_lookup_seed, prims.inductor_randint}
    return frozenset(get_default_op_list().fusible_ops) | more


def is_fusible(node: fx.Node) -> bool:
    """Whether Inductor generates the node's code inside the kernel that reads it.

    With ``fallback_random`` PyTorch's own random ops are left, which PyTorch takes for fusible, too: a second kernel
    that reads one would draw other numbers.
    """
    return getattr(node.target, "overloadpacket", node.target) in _fusible_packets() and not is_random(node)


def is_generated(node: fx.Node) -> bool:
    """Whether Inductor generates code for the node, but not inside of what reads it: reductions, lookups, pools.

    For the backward of a pool see :func:`is_spread_inside`.
    """
    return getattr(node.target, "overloadpacket", None) in _GENERATED or spreads(node)


def gathers(node: fx.Node) -> bool:
    """Whether each element of what the node makes is computed from several of its first input, or several from one."""
    return getattr(node.target, "overloadpacket", None) in _GATHERING


def spreads(node: fx.Node) -> bool:
    """Whether the node is the backward of a pool, and Inductor's own."""
    return _windows(node) > 0


def is_spread_inside(node: fx.Node, channels_last: bool) -> bool:
    """Whether it is computed inside of what reads it: no windows overlap, and Inductor does not lay it out itself."""
    return _windows(node) == 1 and not _is_laid_out(node, channels_last)


def reads_shape_only(node: fx.Node, channels_last: bool) -> bool:
    """Whether nothing but the shape matters of a pool backward's second argument, which is what was pooled."""
    return spreads(node) and not _is_laid_out(node, channels_last)


def may_overwrite(node: fx.Node) -> bool:
    """Whether Inductor may write what it generates for the node over what the node reads."""
    return not gathers(node) and not spreads(node)


def _is_laid_out(node: fx.Node, channels_last: bool) -> bool:
    """Whether Inductor writes a pool's backward channels last, which it only does for maxima."""
    strides = (other.meta["val"].stride(-3) for other in node.all_input_nodes[:2])
    return node.target == _MAX_POOL and (channels_last or 1 in strides)


def _windows(node: fx.Node) -> int:
    """How many windows of a pool share an element, given its backward; 0 for what is none, or left to a library."""
    if node.target not in (_MAX_POOL, _AVG_POOL):
        return 0
    sizes, strides, dilations = (cast(Sequence[int], node.args[position]) for position in (2, 3, 5))
    windows = math.prod(-(-sizes[side] // (strides or sizes)[side]) for side in (0, -1))
    is_dilated = node.target == _MAX_POOL and set(dilations) != {1}
    return 0 if is_dilated or windows > _MOST_WINDOWS else windows


_MAX_POOL = torch.ops.aten.max_pool2d_with_indices_backward.default
_AVG_POOL = torch.ops.aten.avg_pool2d_backward.default
_MOST_WINDOWS = 25
_GATHERING = {
    getattr(torch.ops.aten, name) for name in ("avg_pool2d", "max_pool2d_with_indices", "upsample_nearest2d")
} | {torch.ops.prims._low_memory_max_pool_with_offsets}

_GENERATED = {
    getattr(torch.ops.aten, name)
    for name in (
        "sum", "mean", "amax", "amin", "var", "var_mean", "std", "any", "all", "argmax", "argmin", "prod", "max", "min",
        "cumsum", "_softmax", "_log_softmax", "embedding", "cat", "constant_pad_nd", "avg_pool2d",
        "max_pool2d_with_indices", "upsample_nearest2d", "slice_scatter", "select_scatter",
    )
} | {
    getattr(torch.ops.prims, name)
    for name in ("sum", "var", "prepare_softmax_online", "_low_memory_max_pool_with_offsets")
}  # fmt: skip

_PLACE = "recoup_place"


class _Place(NamedTuple):
    """Between which library kernels a node may run, by their number, and whether it has to."""

    first: int
    last: int
    fixed: bool


class _PlannedPartitioner(CustomPartitionerFn):
    """Inductor's official place for another partitioner."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._places = ""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        num_fwd_outputs = options.pop("num_fwd_outputs")
        halves = self._partition(gm, num_fwd_outputs)
        if halves is None:
            return min_cut_rematerialization_partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)
        inductor_config.allow_buffer_reuse = False  # it keeps dead buffers for later ones, unaware of workspaces
        inductor_config.reorder_for_peak_memory = False  # unaware of them, too
        inductor_config._post_fusion_custom_pass = _IN_ORDER
        for half in halves:
            _keep_products(half.graph)
            half.recompile()
        places = [[node.meta.get(_PLACE) for node in half.graph.nodes] for half in halves]
        self._places = repr((num_fwd_outputs, places))
        return halves

    def __deepcopy__(self, _memo: Any) -> _PlannedPartitioner:
        return self  # Inductor copies its configuration to print it

    def __reduce__(self) -> tuple[type, tuple[bytes]]:
        return bytes, (self.uuid(),)  # it pickles its configuration to look for what it has compiled before

    def uuid(self) -> bytes:
        """What Inductor's code depends on that is not in the graphs that it is given."""
        return get_hash_for_files((__file__,), self._places)


_SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)  # torch 2.11 takes any function


class _InOrder(_SchedulerPass):  # type: ignore[misc]
    """Inductor's place for another order of the kernels that it made: that of their last nodes in the half's graph.

    By itself it runs late what nothing waits for, such as a bias's gradient, which holds on to all that it sums up.
    This goes instead of a pass that the user may have set.
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:
        if not nodes:
            return nodes
        places: dict[fx.Node, int] = {}
        for graph in {origin.graph for node in nodes for origin in _origins(node)}:
            places.update((node, place) for place, node in enumerate(graph.nodes) if node.op != "placeholder")

        def last(node: Any) -> float:
            """Where it goes; what is of none, such as the copy of a weight, waits until it is read."""
            return max((places[origin] for origin in _origins(node) if origin in places), default=math.inf)

        return list(nodes[0].scheduler.topological_sort_schedule(sorted(nodes, key=last)))

    def uuid(self) -> bytes:
        """As for the partitioner."""
        return get_hash_for_files((__file__,))


_IN_ORDER = _InOrder()


def keep_place(node: fx.Node, place: int, *, fixed: bool = False, own_kernel: bool = False) -> None:
    """Let :func:`compile_inductor` fuse a ``fixed`` node only with others of the same place between library kernels.

    Else Inductor computes a chain of sums, which a plan makes again one after the other, all at once and early. What
    belongs to a library kernel (``own_kernel``) is on both sides of it: a copy that it reads, a bias that is added.
    """
    node.meta[_PLACE] = _Place(place, place + own_kernel, fixed)


def _may_be_fused(node1: Any, node2: Any) -> bool:
    """Whether two nodes of Inductor's scheduler are not kept at different places."""
    places = [*_places(node1), *_places(node2)]
    return _meet(places) or not any(place.fixed for place in places)


def _meet(places: Sequence[_Place]) -> bool:
    """Whether there is a place where all may run."""
    return max((place.first for place in places), default=0) <= min((place.last for place in places), default=0)


def _keep_products(half: fx.Graph) -> None:
    """Let a matrix product run where the plan has it, and not where it is added to something later, as the gradients of
    a weight that is used twice are: Inductor would make one call of both, and keep what is multiplied until then.

    Of two products it takes the second. Else the sum is given a copy, which is made inside of it.
    """
    for node in half.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        products = [part for part in node.all_input_nodes if _is_product(part)]
        early = [part for part in products if not _meet([part.meta[_PLACE], node.meta[_PLACE]])]
        if node.kwargs or not early:
            continue
        if len(products) > len(early):
            node.args = (*early, *(part for part in products if part not in early))
            continue
        for part in early:
            with half.inserting_before(node):
                copied = kept_copy(part)
            copied.meta[_PLACE] = node.meta[_PLACE]
            node.replace_input_with(part, copied)


def kept_copy(node: fx.Node) -> fx.Node:
    """A copy that Inductor does not take for none: the greater of a number and itself."""
    return call_on(node.graph, torch.ops.aten.maximum.default, node, node)


def _is_product(node: fx.Node) -> bool:
    """Whether it is one of floats: of complex numbers none is the greater."""
    return node.target == torch.ops.aten.mm.default and bool(node.meta["val"].is_floating_point())


def _places(node: Any) -> list[_Place]:
    """The places of what a node of Inductor's scheduler computes; what was folded is part of what reads it last."""
    found = ([origin.meta.get(_PLACE) for origin in _origins(part)] for part in node.get_nodes())
    return [max(known) for marks in found if (known := [mark for mark in marks if mark is not None])]


def _origins(node: Any) -> Iterator[fx.Node]:
    """The nodes of a graph that a node of Inductor's scheduler computes."""
    return (origin for part in node.get_nodes() if part.node is not None for origin in part.node.get_origins())


@contextmanager
def _keeping_places() -> Iterator[None]:
    chosen = type(V.choices)

    class KeepsPlaces(chosen):  # type: ignore[misc, valid-type]
        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            return _may_be_fused(node1, node2) and bool(chosen.can_fuse(scheduler, node1, node2, shared_data_score))

    with V.set_choices_handler(KeepsPlaces()):
        yield


def prefers_channels_last(forward: Iterable[fx.Node]) -> bool:
    """Whether Inductor, by its own rules, lays out what the forward's convolutions read and write channels last."""
    module: Any = SimpleNamespace(graph=SimpleNamespace(nodes=list(forward)))
    return bool(GraphLowering.decide_layout_opt(module, is_inference=False))


def lay_out_convolutions(channels_last: bool) -> None:
    """So in both halves; for a partition that :func:`compile_inductor` asks.

    Inductor would decide for each half by the convolutions in it, and those that a plan makes again are others in each.
    """
    inductor_config.layout_optimization = inductor_config.force_layout_optimization = channels_last


def compile_inductor(module: fx.GraphModule, args: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """Compile ``module`` with Inductor at the concrete shapes of ``args``, split by ``partition``.

    A partition of None leaves the split to PyTorch's own partitioner.

    A hit in AOTAutograd's cache would never call the partitioner, so that cache is off; Inductor's own, of compiled
    halves, is on if the user has not turned it off. The backward is compiled here, too, and not when it first runs.
    """
    fresh = fx.GraphModule(module, copy.deepcopy(module.graph))
    planned = inductor_config.patch(
        custom_partitioner_fn=_PlannedPartitioner(partition),
        allow_buffer_reuse=inductor_config.allow_buffer_reuse,
        reorder_for_peak_memory=inductor_config.reorder_for_peak_memory,
        _post_fusion_custom_pass=inductor_config._post_fusion_custom_pass,
        layout_optimization=inductor_config.layout_optimization,
        force_layout_optimization=inductor_config.force_layout_optimization,
    )
    functorch = functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True)
    with compile_lock, planned, functorch, _keeping_places():
        function = compile_fx(fresh, list(args), inner_compile=_compile_half)
    return torch._dynamo.disable(function, reason="recoup runs this graph by its plan")


def _compile_half(half: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Compile as Inductor does under Dynamo, where it looks for what it has compiled before: not without a shape
    environment, for the sizes that vary, of which there are none here."""
    mode: Any = detect_fake_mode(inputs)
    if mode is None or mode.shape_env is not None:
        return compile_fx_inner(half, inputs, **options)
    mode.shape_env = ShapeEnv()
    try:
        return compile_fx_inner(half, inputs, **options)
    finally:
        mode.shape_env = None
