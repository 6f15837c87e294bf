"""Every touch of PyTorch that is not public. Nothing else in recoup imports a ``torch._`` module.

Each function says which upstream behaviour it stands on; the tests pass on the oldest and the newest supported torch.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.utils import graph_break_reasons
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from recoup.errors import CaptureError

UNTRACEABLE = (DataDependentOutputException, DynamicOutputShapeException)  # what depends on numbers in a tensor
RUN_AND_SAVE_STATE = rng_prims.run_and_save_rng_state  # (op, *args): the generator's state before, and the result
RUN_WITH_STATE = rng_prims.run_with_rng_state  # (state, op, *args): the result; both for the current device
RECOMPILE_LIMIT = 64  # PyTorch's own is 8, after which it runs eagerly: fewer than the layers one may unfreeze in turn
_names = itertools.count()
Partition = Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule] | None]


def compile_dynamo(
    function: Callable[..., Any], backend: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[[], None]]:
    """``torch.compile`` with settings that leave no way past the plan; and what makes Dynamo look again.

    It does not by itself, not even at what it knows, once a call had nothing in it to capture.

    Dynamo's answer to its limit of recompilations is to run eagerly, which would break the budget without a word; here
    it is an error. The limit is per code object, and what changes from call to call is remembered by its name, so
    ``function`` gets a code object and a name of its own: else a second model would be traced with its epsilon as a
    variable. Hooks that a user adds later are noticed, and integers on modules, such as a counter of calls, are no
    reason to compile again unless something is computed with them. Inside DistributedDataParallel a step stays whole:
    by default it is cut where a bucket of gradients is full, and each piece would be planned for itself. While another
    thread traces, which Dynamo cannot tell from being traced itself, this one is planned as ever: :func:`is_traced`.
    """

    def step(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    step.__code__ = step.__code__.replace(co_name=f"step_{next(_names)}")
    compiled = torch.compile(step, backend=backend)
    settings = {
        "fail_on_recompile_limit_hit": True,
        "recompile_limit": max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit),
        "accumulated_recompile_limit": max(
            torch._dynamo.config.accumulated_recompile_limit, torch._dynamo.config.recompile_limit
        ),
        "skip_nnmodule_hook_guards": False,
        "allow_unspec_int_on_nn_module": True,
        "optimize_ddp": False,
        "force_compile_during_fx_trace": True,
    }

    def call(*args: Any, **kwargs: Any) -> Any:
        with _dynamo_set(settings):
            try:
                return compiled(*args, **kwargs)
            except torch._dynamo.exc.FailOnRecompileLimitHit as problem:
                raise CaptureError(
                    f"torch.compile gave up on this program after {settings['recompile_limit']} variants of it: it "
                    "changes in something that it is compiled for. TORCH_LOGS=recompiles says what; "
                    "torch._dynamo.config.recompile_limit, set before recoup.optimize, allows for more: "
                    f"{str(problem).splitlines()[0]}"
                ) from None

    def look_again() -> None:
        set_code_exec_strategy(step.__code__, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))

    return call, look_again


_setting = threading.Lock()
_calls: list[dict[str, Any]] = []
"""What each planned call that runs now found Dynamo set to."""


@contextmanager
def _dynamo_set(settings: dict[str, Any]) -> Iterator[None]:
    """Dynamo so set, until the last of the calls that overlap ends: in torch 2.11 settings are for all threads."""
    if not _set_for_all():
        with torch._dynamo.config.patch(settings):
            yield
        return
    config: Any = torch._dynamo.config
    with _setting:
        _calls.append(_calls[0] if _calls else {name: getattr(config, name) for name in settings})
        _assign(config, settings)
    try:
        yield
    finally:
        with _setting:
            before = _calls.pop()
            if not _calls:
                _assign(config, before)


def _assign(config: Any, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        setattr(config, name, value)


@cache
def _set_for_all() -> bool:
    """Whether another thread sees what Dynamo is set to in this one."""
    config: Any = torch._dynamo.config
    with config.patch(recompile_limit=config.recompile_limit + 1), ThreadPoolExecutor(1) as other:
        return bool(other.submit(lambda: config.recompile_limit).result() == config.recompile_limit)


def called_plainly(module: nn.Module) -> Callable[..., Any]:
    """What calling the module runs, hooks included, when nothing was compiled."""
    return module._call_impl


def called_instead(module: nn.Module) -> Callable[..., Any] | None:
    """What :func:`call_instead` has set."""
    return module._compiled_call_impl


def call_instead(module: nn.Module, function: Callable[..., Any]) -> None:
    """Let calling the module run ``function``, as ``module.compile()`` does; a copy or a pickle is without it."""
    module._compiled_call_impl = function


def count_writes(tensor: torch.Tensor) -> int:
    """How often the tensor was written to in place; one made in inference mode never is, outside of it."""
    return 0 if tensor.is_inference() else tensor._version


def allocated_and_released(recorded: torch.autograd.profiler.profile) -> list[int]:
    """Bytes that the allocator handed out, or took back if negative, in order of time."""
    found: Any = recorded.kineto_results
    events = [event for event in found.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def is_made_of_others(func: Any) -> bool:
    """Whether an operator has no kernel of its own, such as ``reshape``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def has_maximum(arg: Any) -> bool:
    """Whether the user has marked a size with its maximum: ``torch._dynamo.mark_dynamic(arg, 0, min=..., max=...)``."""
    return any(one.max is not None for one in getattr(arg, "_dynamo_dynamic_range", ()))


def active_mode() -> str | None:
    """The name of a ``TorchDispatchMode`` that is on, under which Dynamo captures nothing."""
    mode = _get_current_dispatch_mode()
    return None if mode is None else type(mode).__name__


def largest_sizes(example: Any) -> tuple[int, ...] | None:
    """The sizes of a captured input, or the number that it is, where those that vary are at their maximum.

    None where one has none that Dynamo knows of.
    """
    found: list[int] = []
    for size in example.shape if isinstance(example, torch.Tensor) else (example,):
        most = size.node.shape_env.bound_sympy(size.node.expr).upper if isinstance(size, torch.SymInt) else size
        if not getattr(most, "is_Integer", True):
            return None
        found.append(int(most))
    return tuple(found)


@dataclass(frozen=True)
class Break:
    """Why Dynamo stopped capturing the program for a while, and where in the user's code."""

    reason: str
    where: str

    def __str__(self) -> str:
        return f"{self.reason} at {self.where}"


def graph_break(module: fx.GraphModule) -> Break | None:
    """What ended this part of the program early, if anything did."""
    reason = getattr(module, "compile_subgraph_reason", None)
    return None if reason is None or not reason.graph_break else _break(reason)


def is_traced(given: Iterable[Any]) -> bool:
    """Whether this runs while somebody traces it, in this thread: ``torch.compiler.is_compiling`` is true in all."""
    return (
        torch.compiler.is_dynamo_compiling()
        or torch.compiler.is_exporting()
        or torch._C._get_tracing_state() is not None
        or get_proxy_mode() is not None
        or any(isinstance(arg, fx.Proxy) for arg in given)
    )


def is_transformed() -> bool:
    """Whether this runs inside ``torch.func.grad``, ``vmap`` or another transform, where Dynamo captures nothing."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_float_in_a_tensor(node: fx.Node) -> bool:
    """Whether this input of a captured graph is a Python float for the caller, which Dynamo passes in a tensor."""
    return bool(getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False))


def count_breaks() -> int:
    """How many there were in this process; :func:`breaks_since` says which."""
    return len(graph_break_reasons)


def breaks_since(count: int) -> list[Break]:
    """Those that Dynamo came upon since it had come upon ``count``, also where no part ends: it was not capturing.

    Whatever is being compiled at the time counts: in other threads, or by an operator that compiles something itself.
    """
    return [_break(reason) for reason in graph_break_reasons[count:]]


def _break(reason: GraphCompileReason) -> Break:
    files = [f"{frame.filename}:{frame.lineno}" for frame in reason.user_stack]
    files = [file for file in files if not file.startswith(_RECOUP)]
    own = [file for file in files if not file.startswith(_TORCH)]
    return Break(str(reason.reason).splitlines()[0], (own or files or ["its beginning"])[-1])


_RECOUP = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep


def compile_joint(module: fx.GraphModule, args: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """Trace forward and backward of ``module`` into one ATen graph, split it with ``partition``, and join the halves.

    AOTAutograd at the concrete shapes of ``args``: functionalized, with input mutations applied after the forward. The
    halves run as boxed fx code; so does the whole where nothing needs a gradient.
    """

    def split(joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        return partition(joint, num_fwd_outputs)

    def run(gm: fx.GraphModule, example_inputs: Any) -> Any:
        return boxed(gm)

    with compile_lock:
        function = aot_module_simplified(module, list(args), fw_compiler=run, bw_compiler=run, partition_fn=split)
    return torch._dynamo.disable(function, reason="recoup runs this graph by its plan")


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


def float32_precisions() -> list[str]:
    """How exactly float32 is computed; the public settings of old cannot be read once the new ones have been used."""
    precision = torch._C._get_fp32_precision_getter
    return [precision(library, kind) for library in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")]


def is_profiled() -> bool:
    """Whether one of PyTorch's profilers runs, in any thread; there can only be one."""
    return bool(torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled)


def is_open(profiler: torch.autograd.profiler.profile) -> bool:
    """Whether it has begun and not ended; one that is warming up does not count as running."""
    return bool(getattr(profiler, "entered", False) and profiler.kineto_results is None)  # one switched off has neither


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor only describes one, or stands for one, while a program is traced; some outlive that."""
    return isinstance(tensor, FakeTensor | FunctionalTensor) or torch._is_functional_tensor(tensor)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in memory itself.

    Not a sparse one, nor what a ``torch.func`` transform or a subclass wraps, nor a parameter that has no shape yet.
    """
    if not torch._C._has_storage(tensor):
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except Exception:  # a subclass may refuse in any way
        return False
    return True


def subclasses_aside() -> AbstractContextManager[None]:
    """Ask tensors of any class as tensors: a class may refuse to say even where it is."""
    return torch._C.DisableTorchFunctionSubclass()


def storage_key(tensor: torch.Tensor) -> int:
    """The same for two tensors exactly if they share a storage (also for the fake tensors of a traced graph)."""
    if tensor.layout != torch.strided:
        raise CaptureError(
            f"the step makes a tensor of layout {tensor.layout}, which cannot be planned; an embedding with "
            "sparse=False has a dense gradient"
        )
    return int(tensor.untyped_storage()._cdata)


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


def no_longer_of_forward(node: fx.Node) -> None:
    """What was added later says nothing about where the forward's trace ends, whatever it was made from."""
    node.meta.pop("partitioner_tag", None)


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
    """Whether a second run may differ in the last bits: ops that add with atomics on CUDA."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "cuda" and _packet_name(node) in ATOMIC


def _packet_name(node: fx.Node) -> str:
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))


COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem")
ATOMIC = {"scatter_add", "scatter_reduce", "index_add", "index_put", "_unsafe_index_put", "put", "cumsum"}


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
    """Whether Inductor generates a kernel for the node whose result is always written: reductions, lookups, pools."""
    return getattr(node.target, "overloadpacket", None) in _GENERATED


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
        self._places = repr([[node.meta.get(_PLACE) for node in half.graph.nodes] for half in halves])
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

    def __reduce__(self) -> tuple[type, tuple[bytes]]:
        return bytes, (self.uuid(),)

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
    if not any(place.fixed for place in places):
        return True
    return max(place.first for place in places) <= min(place.last for place in places)


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


_CUDNN = ({"Cudnn", "CudnnTranspose"},)
_ONEDNN = ({"Mkldnn", "MkldnnTranspose"}, {"Mkldnn", "???"})  # the transposed one has no name yet


def are_one_kernel(one: tuple[Any, ...], other: tuple[Any, ...], nearly: bool) -> bool:
    """Whether of two convolutions, one of them transposed, each is the gradient of the other's input.

    Each is given by the arguments of ``aten.convolution``. cuDNN runs the same kernel for both. oneDNN most often does,
    and ``nearly`` takes that for good enough; PyTorch's own kernels are others.
    """
    chosen = {torch._C._select_conv_backend(*args, None).name for args in (one, other)}
    return chosen in (_CUDNN + _ONEDNN if nearly else _CUDNN)


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
    """Compile as Inductor does under Dynamo: it looks for what it has compiled before only where sizes might vary."""
    mode: Any = detect_fake_mode(inputs)
    if mode is None or mode.shape_env is not None:
        return compile_fx_inner(half, inputs, **options)
    mode.shape_env = ShapeEnv()  # of no sizes: they are all known
    try:
        return compile_fx_inner(half, inputs, **options)
    finally:
        mode.shape_env = None
