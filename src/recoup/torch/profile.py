"""Measure each distinct op of a step once, alone, on the device it runs on."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_map

from recoup.errors import RecoupError
from recoup.torch.costs import Cost, signature, tensors_of
from recoup.torch.estimate import estimate
from recoup.torch.internals import communicates, real_tensors
from recoup.torch.joint import from_tangents
from recoup.torch.memory import allocation_curve, limited_to, refuse_profilers, resident_bytes
from recoup.torch.store import Store, library_versions

WARM_UP = 2  # runs that are not timed: a convolution tries its algorithms in the first, its workspace is that of all
REPEATS = 5
SECONDS = 0.02  # spent timing one op, beyond its first repeat
LESS = 0.9  # of the workspace within which an algorithm was last chosen: for more than this it is not chosen again

Listener = Callable[[int, int], None]


class _Choice(NamedTuple):
    """What cuDNN chooses an algorithm for, once in a process."""

    device: str
    versions: str
    key: str
    in_forward: bool
    """Or in the backward alone, which runs on another thread."""


_tried: dict[_Choice, Cost] = {}
_rooms: dict[_Choice, int] = {}
"""Bytes of workspace within which a choice had to be made again."""


class Untried(Exception):  # noqa: N818
    """While a step is traced: there are convolutions for which cuDNN has yet to try its algorithms."""

    def __init__(self, measure: Callable[[], None]) -> None:
        super().__init__("cuDNN has algorithms to try")
        self.measure = measure


def with_algorithms(trace: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """What ``trace`` returns, once cuDNN has tried the algorithms of what is in it, and it was traced again.

    Not meanwhile: AOTAutograd keeps a backward on the thread that calls it, and a lock is held that somebody else's
    backward, on the thread on which it would run, may be waiting for.
    """
    while True:
        try:
            return trace()
        except Untried as found:
            measure = found.measure
        measure()


def profile(nodes: Iterable[fx.Node], store: Store, listen: Listener, channels_last: bool = False) -> dict[str, Cost]:
    """The cost of every signature among the nodes, from the store or measured now; estimated where it cannot run.

    ``channels_last`` measures convolutions in that layout, which Inductor chooses for most networks. Where cuDNN tries
    its algorithms it may choose others in each process: the seconds are those of before, so that the plan is, too, and
    the workspace is that of now. Each thread has its own choice, and the backward runs on another than the forward: the
    larger workspace counts. The step will not try them again. That is for :func:`with_algorithms` to see to.
    """
    device = store.device
    versions = library_versions()
    nodes = list(nodes)
    distinct = {signature(node): node for node in nodes}
    choices = _choices(nodes, device, channels_last)
    untried = {choice: (distinct[key], None) for key, choice in choices.items() if choice not in _tried}
    if untried:
        raise Untried(partial(_try_algorithms, untried, store, listen, channels_last))
    costs = {key: found for key in distinct if (found := store.cost(_key(key, channels_last))) is not None}
    for key, choice in choices.items():
        costs[key] = replace(store.cost(_kept_as(choice)) or _tried[choice], workspace=_tried[choice].workspace)
    missing = [(key, node) for key, node in distinct.items() if key not in costs]
    if missing and device.type == "cpu":
        refuse_profilers()
    with real_tensors(device):
        for count, (key, node) in enumerate(missing):
            listen(count, len(missing))
            costs[key] = _measure(node, device, channels_last) or estimate(node, store.rates())
            if library_versions() != versions:
                break
            store.remember(_key(key, channels_last), costs[key])
    if library_versions() != versions:  # on some CPUs PyTorch gives up oneDNN for good at its first bfloat16 product
        store.reload()
        return profile(nodes, store, listen, channels_last)
    if missing:
        listen(len(missing), len(missing))
    store.save()
    return costs


def choose_again(
    nodes: Mapping[fx.Node, int | None], store: Store, listen: Listener, channels_last: bool = False
) -> None:
    """Have cuDNN choose algorithms with workspaces of no more than so many bytes, where a number is given.

    For :func:`with_algorithms`. Nothing happens if one of them has no algorithms to choose from, which leaves nothing
    that fits, nor if all were asked for as little before.
    """
    choices = _choices(nodes, store.device, channels_last)
    less: dict[_Choice, tuple[fx.Node, int]] = {}
    for node, room in nodes.items():
        if room is not None:
            choice = choices.get(signature(node))
            if choice is None:
                return
            less[choice] = (node, min(room, less.get(choice, (node, room))[1]))
    less = {choice: one for choice, one in less.items() if one[1] < LESS * _rooms.get(choice, math.inf)}
    if less:
        raise Untried(partial(_try_algorithms, less, store, listen, channels_last))


def _choices(nodes: Iterable[fx.Node], device: torch.device, channels_last: bool) -> dict[str, _Choice]:
    """What cuDNN has algorithms for, by signature."""
    nodes, versions = list(nodes), library_versions()
    late = from_tangents(nodes[0].graph) if nodes else set()
    forward = {signature(node) for node in nodes if node not in late}
    return {
        key: _Choice(str(device), versions, _key(key, channels_last), key in forward)
        for key in map(signature, nodes)
        if _has_algorithms(key, device)
    }


def _try_algorithms(
    untried: Mapping[_Choice, tuple[fx.Node, int | None]], store: Store, listen: Listener, channels_last: bool
) -> None:
    """Where they will run: in the forward, or not, and in the backward, where everything may run again."""
    device = store.device
    with real_tensors(device):
        for count, (choice, (node, room)) in enumerate(untried.items()):
            listen(count, len(untried))
            measure = partial(_measure, node, device, channels_last, room)
            threads = [measure() if choice.in_forward else None, _in_backward(device, measure)]
            found = [cost for cost in threads if cost is not None]
            if room is not None:
                _rooms[choice] = room
            kept = store.cost(_kept_as(choice))
            cost = found[0] if found else kept or estimate(node, store.rates())
            _tried[choice] = replace(cost, workspace=max(one.workspace for one in found or [cost]))
            if kept is None:
                store.remember(_kept_as(choice), _tried[choice])
    listen(len(untried), len(untried))
    store.save()


def _kept_as(choice: _Choice) -> str:
    """What the store knows its seconds by: in less memory they are others."""
    return f"{choice.key} in less" if choice in _rooms else choice.key


def _has_algorithms(signature: str, device: torch.device) -> bool:
    """Whether cuDNN tries several for it, when it first meets it in a process."""
    return device.type == "cuda" and torch.backends.cudnn.benchmark and "convolution" in signature


def _in_backward(device: torch.device, measure: Callable[[], Cost | None]) -> Cost | None:
    """On the thread on which autograd runs the backward of what lies on the device."""
    found: list[Cost | None] = []
    with torch.enable_grad():
        result = torch.zeros((), device=device, requires_grad=True).clone()
        result.register_hook(lambda _: found.append(measure()))
        result.backward()
    return found[0]


def _key(signature: str, channels_last: bool) -> str:
    return f"{signature} channels last" if channels_last and "convolution" in signature else signature


def _measure(node: fx.Node, device: torch.device, channels_last: bool, room: int | None = None) -> Cost | None:
    """None if the op does not run on made-up inputs, or not without other processes.

    With a ``room`` cuDNN chooses again first, among algorithms that work in so many bytes.
    """
    if communicates(node):
        return None
    try:
        args, kwargs = tree_map(lambda arg: _real(arg, node, channels_last), (node.args, dict(node.kwargs)))

        def run() -> Any:
            return node.target(*args, **kwargs)  # type: ignore[operator]

        if room is not None:
            _choose_within(room, run, node, device)
        for _ in range(WARM_UP):
            run()
        return _measure_cuda(run, device, args, kwargs) if device.type == "cuda" else _measure_cpu(run, args, kwargs)
    except (torch.OutOfMemoryError, RecoupError):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, NotImplementedError, AttributeError):
        return None


def _choose_within(room: int, run: Callable[[], Any], node: fx.Node, device: torch.device) -> None:
    """Run it with no more memory than that, besides what it returns.

    An algorithm that cannot have its workspace makes cuDNN look for another, which it keeps. Whether there was one is
    for the measurement to see.
    """
    sizes = [tensor.untyped_storage().nbytes() for tensor in tensors_of(node.meta["val"])]
    returned = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    torch.cuda.empty_cache()
    del returned  # its place is left to what the op returns: the limit is for what PyTorch takes from the device
    with limited_to(torch.cuda.memory_reserved(device) + room, device), suppress(RuntimeError):
        run()


def _measure_cpu(run: Callable[[], Any], *given: Any) -> Cost:
    kept: list[Any] = []
    curve = allocation_curve(lambda: kept.append(run()))
    outputs = _new_storages(kept[0], given)
    kept.clear()
    times = [_elapsed(run)]
    while len(times) < REPEATS and sum(times) < SECONDS:
        times.append(_elapsed(run))
    return Cost(statistics.median(times), max(0, max(curve, default=0) - sum(outputs)), outputs)


def _elapsed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _measure_cuda(run: Callable[[], Any], device: torch.device, *given: Any) -> Cost:
    """Events around as many launches as fill a few milliseconds, so that the launch itself is hidden as in a step."""
    before = resident_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    outputs = _new_storages(result, given)
    workspace = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    taken = torch.cuda.memory_allocated(device) - before
    del result
    once = _events(run, device, 1)
    launches = int(max(1, min(50, 0.002 / max(once, 1e-6))))
    times = [_events(run, device, launches) for _ in range(3 if launches > 1 else REPEATS)]
    return Cost(statistics.median(times), workspace, outputs if sum(outputs) else (taken,))


def _events(run: Callable[[], Any], device: torch.device, launches: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(launches):
        run()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1000 / launches


def _new_storages(result: Any, given: Any) -> tuple[int, ...]:
    """Bytes of each storage that was returned and not given."""
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(given)}
    sizes: dict[int, int] = {}
    for tensor in tensors_of(result):
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() not in known:
            sizes[storage.data_ptr() if storage.nbytes() else -len(sizes) - 1] = storage.nbytes()
    return tuple(sizes.values())


def _real(argument: Any, node: fx.Node, channels_last: bool) -> Any:
    """A tensor like the traced one, with numbers in it that every op can take."""
    if not isinstance(argument, fx.Node):
        return argument
    like = argument.meta.get("val")
    if not isinstance(like, torch.Tensor):
        return like
    elements = int(like.untyped_storage().nbytes()) // like.element_size()
    flat = torch.empty(elements, dtype=like.dtype, device=like.device)
    if like.is_floating_point():
        flat.uniform_()  # also a probability: on CUDA one that is none ends the process
    elif like.is_complex():
        flat.normal_()
    elif like.dtype == torch.bool:
        flat.bernoulli_(0.5)
    else:
        flat.random_(0, _largest_index(node))
    made = flat.as_strided(like.shape, like.stride(), like.storage_offset())
    if channels_last and made.dim() == 4 and "convolution" in str(node.target):
        return made.contiguous(memory_format=torch.channels_last)
    return made


def _largest_index(node: fx.Node) -> int:
    """A bound for made-up integers: where it is not known what they are, zero, which every op can take."""
    name = str(node.target)
    first = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], fx.Node) else None
    if "embedding_dense_backward" in name:
        return int(node.args[2])  # type: ignore[arg-type]
    if name == "aten.embedding.default" and isinstance(first, torch.Tensor):
        return first.shape[0]
    if "nll_loss" in name and isinstance(first, torch.Tensor):
        shapes = [other.meta["val"].shape for other in node.all_input_nodes if "val" in other.meta]
        return max(1, min((shape[1] if len(shape) > 1 else shape[0]) for shape in shapes if len(shape) in (2, 4)) or 1)
    return 1
