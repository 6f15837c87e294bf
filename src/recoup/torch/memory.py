"""What the device's allocator counts: how sizes are rounded, what is resident, and how high a step peaked."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, chain, compress, starmap
from typing import Any

import torch

from recoup.errors import BudgetError, CaptureError
from recoup.torch.internals.tensors import (
    allocated_and_released,
    has_storage,
    is_fake,
    is_open,
    is_profiled,
    subclasses_aside,
)

BLOCK = 512  # CUDA's allocator hands out multiples of this
MIB = 2**20
_STARTUP = 10_000  # objects that the garbage collector of some Pythons leaves alone from the start, and never more
_frozen = False  # by us
AUTO_MARGIN = 0.05  # of what is free that budget="auto" leaves: fragmentation, and what other libraries take


def allocated_size(size: int, device: torch.device) -> int:
    """Bytes that a storage of ``size`` bytes counts for in ``torch.cuda.memory_allocated``, or on CPU its own.

    CUDA rounds to 512 bytes. Without expandable segments a large block comes from a segment of whole 2 MiB pieces, and
    a rest of up to 1 MiB stays with the block.
    """
    if device.type != "cuda" or size == 0:
        return size
    rounded = -(-size // BLOCK) * BLOCK
    if rounded <= MIB or expandable_segments():
        return rounded
    whole = -(-rounded // (2 * MIB)) * 2 * MIB
    return whole if whole - rounded <= MIB else rounded


def expandable_segments() -> bool:
    """Whether the allocator grows its segments in place, and so keeps no rest with a block."""
    return _grows(os.environ.get("PYTORCH_ALLOC_CONF"), os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))


@cache
def _grows(*settings: str | None) -> bool:
    return any("expandable_segments:true" in text.lower().replace(" ", "") for text in settings if text)


@cache
def warm_up(device: torch.device) -> None:
    """Let cuBLAS take its workspaces, in this thread and in autograd's, so that they are resident from the start."""
    for dtype in (torch.float32, torch.bfloat16):
        with torch.enable_grad():
            weight = torch.ones(16, 16, dtype=dtype, device=device, requires_grad=True)
            torch.addmm(weight[0], weight, weight).sum().backward()


def resident_bytes(device: torch.device) -> int:
    """Bytes allocated on the device now: by the allocator's count on CUDA, by live storages on CPU."""
    if device.type == "cuda":
        warm_up(device)
        counts = torch.cuda.memory_stats_as_nested_dict(device)  # memory_allocated sorts all of them first
        return int(counts["allocated_bytes"]["all"]["current"]) if counts else 0
    with all_in_sight():
        gc.collect()
        return live_bytes(live_tensors(), device)


@contextmanager
def limited_to(size: int, device: torch.device) -> Iterator[None]:
    """PyTorch's allocator may have no more than ``size`` bytes of the CUDA device; it runs out of memory sooner."""
    before = torch.cuda.get_per_process_memory_fraction(device)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(before, size / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def is_on(place: torch.device, device: torch.device) -> bool:
    """Whether what lies at ``place`` is in the device's memory."""
    return place.type == device.type and (None in (place.index, device.index) or place.index == device.index)


def live_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of the storages behind these tensors that are on the device, each counted once."""
    storages: dict[int, int] = {}
    with subclasses_aside():
        for tensor in tensors:
            if is_on(tensor.device, device) and has_storage(tensor):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = allocated_size(storage.nbytes(), device)
    return sum(storages.values())


def live_tensors() -> Iterable[torch.Tensor]:
    """Every tensor that Python knows of, and the gradients of leaves if no other thread may be training.

    PyTorch ends the process if a gradient is read just when another thread sets it to None. Python knows of those that
    it has read before, as an optimizer does; others are missing then.
    """
    alone = is_alone()
    for thing in _instances(torch.Tensor):
        if not is_fake(thing):
            yield thing
            if alone and thing.is_leaf and thing.grad is not None:
                yield thing.grad


def is_alone() -> bool:
    """Whether no other thread is in code that is not Python's own, as one that waits for work is."""
    for thread, frame in sys._current_frames().items():
        if thread != threading.get_ident():
            modules = (str(inner.f_globals.get("__name__")) for inner, _ in traceback.walk_stack(frame))
            if any(module.partition(".")[0] not in sys.stdlib_module_names for module in modules):
                return False
    return True


def _instances(kind: type) -> list[Any]:
    """Every object of this type, or one derived from it, that the garbage collector knows.

    Found in one call, in which no other thread runs: one that is building a tuple fails if somebody else has seen it.
    """
    kinds = [kind]
    for known in kinds:
        kinds += type.__subclasses__(known)
    seen: list[Any] = []
    see: Iterator[Any] = filter(None, map(seen.extend, map(gc.get_objects, (None,))))
    found = set(map(object.__hash__, kinds)).__contains__  # a class may have a hash of its own, or none
    choose = compress(seen, map(found, map(object.__hash__, map(type, seen))))
    forget: Iterator[Any] = filter(None, starmap(seen.clear, ((),)))
    with all_in_sight():
        return list(chain(see, choose, forget))


def freeze() -> None:
    """Tell the garbage collector to leave alone what there is (``gc.freeze``)."""
    global _frozen
    gc.freeze()
    _frozen = True


def unfreeze() -> None:
    """Let it look at everything again."""
    global _frozen
    gc.unfreeze()
    _frozen = False


def is_frozen() -> bool:
    """Whether it was told to leave alone what there is, by us or by the program."""
    return _frozen or gc.get_freeze_count() > _STARTUP


@contextmanager
def all_in_sight() -> Iterator[None]:
    """Let the garbage collector see what it was told to leave alone; afterwards it leaves alone what is there then."""
    frozen = is_frozen()
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def automatic_budget(device: torch.device) -> int:
    """What is allocated now and what is free on the device, less a margin of 5 % of the free part."""
    if device.type != "cuda":
        raise BudgetError(f"budget='auto' asks the device what is free; on {device.type} give bytes or a fraction")
    free, _total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.memory_allocated(device) + int((free + cached) * (1 - AUTO_MARGIN))


def measure_peak(function: Callable[[], Any], device: torch.device) -> int:
    """The most bytes allocated on the device while ``function`` runs, what was there before included."""
    return sum(measure_rise(function, device))


def measure_rise(function: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    """Bytes allocated on the device before ``function`` runs, and the most that it adds to them."""
    if device.type == "cuda":
        gc.collect()  # what is there before is not to go meanwhile
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = resident_bytes(device)
        function()
        torch.cuda.synchronize(device)
        return before, torch.cuda.max_memory_allocated(device) - before
    refuse_profilers()
    return resident_bytes(device), max(allocation_curve(function), default=0)


def refuse_profilers() -> None:
    """On CPU memory is measured with PyTorch's profiler, of which there is one: a second ends the process."""
    if is_profiled() or any(map(is_open, _instances(torch.autograd.profiler.profile))):
        raise CaptureError(
            "on CPU memory is measured with PyTorch's profiler, which runs already: run one step before profiling"
        )


def allocation_curve(function: Callable[[], Any]) -> list[int]:
    """Bytes held on CPU after each allocation and release in ``function``, from PyTorch's profiler, if none runs."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it announces every start and stop on stderr otherwise
    with torch.autograd.profiler.profile(profile_memory=True) as recorded:
        function()
    return list(accumulate(allocated_and_released(recorded)))
