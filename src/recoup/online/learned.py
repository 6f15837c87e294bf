"""What an operator takes, learned from its own runs: seconds, new bytes, and workspace, by its arguments' shapes."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from recoup.online.adapter import below_autograd, describe, keep_busy, storage_of
from recoup.online.calls import fresh_storages, replaced
from recoup.online.report import Report
from recoup.torch.memory import allocated_size, limited_to

SCALARS = 64  # bytes that an operator may take on CPU to wrap numbers as tensors
START = 5e-5  # seconds of the CPU's time to repeat an operator on CUDA
TIMED_RUNS = 3  # the first of them warms up; the least of them counts


_workspaces: dict[Hashable, int] = {}
"""What operators on CUDA took to work in, by device, operator and arguments: the next block need not guess."""


@dataclass(slots=True)
class Learned:
    """One operator on arguments of one kind."""

    size: int
    """Bytes of the new storages that it returns."""
    workspace: int = 0
    least: float = 0.0
    """Seconds that it takes to start it again, whatever it does."""
    number: int = -1
    """Different for different operators and kinds of arguments."""
    alike: int = -1
    """The same for two that a program may well exchange from step to step."""
    seconds: float = 0.0
    runs: int = 0
    passing: bool = False
    """Whether the program lets go of what it makes soon, as of a gradient in a chain: what is made from that had better
    not be evicted as if it would stay."""

    @property
    def cost(self) -> float:
        """Seconds that it costs to repeat it."""
        return max(self.seconds, self.least)


class Lessons:
    """By operator and arguments. On CUDA seconds come from events that are read once they have passed."""

    def __init__(self, device: torch.device, report: Report) -> None:
        self.device = device
        self._report = report
        self._known: dict[Hashable, Learned] = {}
        self._alike: dict[Hashable, Learned] = {}
        self._pending: list[tuple[Learned, torch.cuda.Event, torch.cuda.Event, bool]] = []

    def find(
        self,
        key: tuple[Hashable, ...],
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Learned:
        """What is known of this operator, with which ``key`` begins, on these arguments; if it never ran, its new bytes
        are foretold."""
        known = self._known.get(key)
        if known is None:
            known = self._foretell(func, args, kwargs, tensors)
            known.workspace = _workspaces.get((self.device, key), known.workspace)
            known.number = len(self._known)
            self._known[key] = known
            twin = self._alike.setdefault((canonical(func), key[1:]), known)
            known.alike = twin.number
            known.runs, known.seconds = twin.runs, twin.seconds
        return known

    def run(self, known: Learned, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], limited: bool) -> Any:
        """Run it and time it; after :data:`TIMED_RUNS` that teaches nothing any more.

        ``limited``: rather run out of memory than break the budget. Not a convolution, though, which would take to an
        algorithm that works in less, and is slow, for good.
        """
        if self.device.type == "cuda":
            limits = limited and known.runs == 0 and not _convolves(func)  # after that its workspace is known
            with limited_to(self._report.budget_bytes, self.device) if limits else nullcontext():
                return self._run_cuda(known, func, args, kwargs)
        start = time.perf_counter()
        result = func(*args, **kwargs)
        took = time.perf_counter() - start
        known.seconds = took if known.runs == 0 else min(known.seconds, took)
        known.runs += 1
        return result

    def close(self) -> None:
        """The block is over."""
        if self.device.type == "cuda":
            _workspaces.update(
                {(self.device, key): known.workspace for key, known in self._known.items() if known.runs}
            )

    def _run_cuda(self, known: Learned, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._read_events()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._report.reached(torch.cuda.max_memory_allocated(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        keep_busy()  # else what the CPU takes to launch it would count as its time
        start.record()
        result = func(*args, **kwargs)
        end.record()
        highest = torch.cuda.max_memory_allocated(self.device)
        self._report.exceed(describe(func), highest)
        above = highest - torch.cuda.memory_allocated(self.device)
        if known.runs == 0 and known.workspace > above:
            self._report.excuse()  # what went to make room for a guess
        known.workspace = above if known.runs == 0 else max(known.workspace, above)
        known.runs += 1
        self._pending.append((known, start, end, known.seconds == 0))
        return result

    def _read_events(self) -> None:
        while self._pending and self._pending[0][2].query():
            known, start, end, uncounted = self._pending.pop(0)
            took = start.elapsed_time(end) / 1000
            if uncounted:  # nobody knew yet what it takes
                self._report.base_seconds += took
            known.seconds = took if known.seconds == 0 else min(known.seconds, took)

    def _foretell(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> Learned:
        """Bytes of what it will return, from PyTorch's own shape functions; the inputs' bytes where there is none."""
        try:
            metas = [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta") for one in tensors]
            others = iter(metas)
            with below_autograd():
                on_meta = replaced(args, others)
                names = dict(zip(kwargs, replaced(tuple(kwargs.values()), others), strict=True))
                if "device" in names or not tensors:
                    names["device"] = torch.device("meta")
                result = func(*on_meta, **names)
            made = fresh_storages(result, [storage_of(one) for one in metas], torch.device("meta"))
            size = sum(allocated_size(storage.nbytes(), self.device) for storage in made)
        except Exception:  # any operator may have no shape function, or one that wants numbers
            size = _bytes(tensors)
            if torch.Tag.dynamic_output_shape in func.tags:  # `nonzero` and its like may return indices of everything
                size += sum(8 * one.numel() * max(1, one.dim()) for one in tensors)
        if self.device.type != "cuda":
            return Learned(size, SCALARS)
        return Learned(size, guessed_workspace(func, size, tensors), START)


def guessed_workspace(func: Any, size: int, tensors: Sequence[torch.Tensor]) -> int:
    """A convolution that never ran may want as much to work in, on CUDA, as it reads and writes, and backwards twice
    that."""
    often = 0 if not _convolves(func) else 2 if "backward" in func.overloadpacket.__name__ else 1
    return often * (size + _bytes(tensors))


def _convolves(func: Any) -> bool:
    return "conv" in func.overloadpacket.__name__


def canonical(func: Any) -> Any:
    """Autograd adds two gradients in place if nobody else holds the first one, which may change from step to step."""
    return torch.ops.aten.add.Tensor if func is torch.ops.aten.add_.Tensor else func


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)
