"""Run one op alone, on made-up inputs, on the device it runs on: how long it takes, and in how much memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from recoup.errors import RecoupError
from recoup.torch.costs import Cost, tensors_of
from recoup.torch.internals.graphs import communicates
from recoup.torch.memory import allocation_curve, limited_to, resident_bytes

WARM_UP = 2  # runs that are not timed: a convolution tries its algorithms in the first, its workspace is that of all
REPEATS = 5
SECONDS = 0.02  # spent timing one op, beyond its first repeat


def measured_as(signature: str, channels_last: bool) -> str:
    """What a measurement is known by: convolutions may be laid out in another way than they were traced."""
    return f"{signature} channels last" if channels_last and "convolution" in signature else signature


def measure(node: fx.Node, device: torch.device, channels_last: bool, room: int | None = None) -> Cost | None:
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
