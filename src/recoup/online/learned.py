"""What an operator takes, learned from its own runs: seconds, new bytes, and workspace, by its arguments' shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recoup.online.adapter import below_autograd, storage_of
from recoup.online.contents import flat_tensors

TIMED_RUNS = 3  # the first of them warms up; the least of them counts


@dataclass(slots=True)
class Learned:
    """One operator on arguments of one kind."""

    size: int
    """Bytes of the new storages that it returns."""
    workspace: int = 0
    seconds: float = 0.0
    runs: int = 0


class Lessons:
    """By operator and arguments. On CUDA seconds come from events that are read once they have passed."""

    def __init__(self, device: torch.device, rounded: Callable[[int], int]) -> None:
        self.device = device
        self._rounded = rounded
        self._known: dict[Hashable, Learned] = {}
        self._pending: list[tuple[Learned, torch.cuda.Event, torch.cuda.Event]] = []

    def find(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> Learned:
        """What is known of this operator on these arguments; its new bytes are foretold if it never ran."""
        key = (func, _key(args), _key(tuple(kwargs.items())) if kwargs else ())
        known = self._known.get(key)
        if known is None:
            known = Learned(*self._foretell(func, args, kwargs, tensors))
            self._known[key] = known
        return known

    def run(self, known: Learned, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it, and time it as long as that teaches something."""
        if self.device.type == "cuda":
            return self._run_cuda(known, func, args, kwargs)
        start = time.perf_counter()
        result = func(*args, **kwargs)
        took = time.perf_counter() - start
        known.seconds = took if known.runs == 0 else min(known.seconds, took)
        known.runs += 1
        return result

    def _run_cuda(self, known: Learned, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if known.runs >= TIMED_RUNS:
            return func(*args, **kwargs)
        self._read_events()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.reset_peak_memory_stats(self.device)
        start.record()
        result = func(*args, **kwargs)
        end.record()
        above = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        known.workspace = above if known.runs == 0 else min(known.workspace, above)
        known.runs += 1
        self._pending.append((known, start, end))
        return result

    def _read_events(self) -> None:
        while self._pending and self._pending[0][2].query():
            known, start, end = self._pending.pop(0)
            took = start.elapsed_time(end) / 1000
            known.seconds = took if known.seconds == 0 else min(known.seconds, took)

    def _foretell(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> tuple[int, int]:
        """Bytes of what it will return, from PyTorch's own shape functions; the inputs' bytes where there is none.

        A convolution that never ran may want as much again to work in, on CUDA.
        """
        metas = [_meta(tensor) for tensor in tensors]
        given = {_storage_id(tensor) for tensor in metas}
        replaced = iter(metas)
        try:
            with below_autograd():
                on_meta = {key: "meta" if key == "device" else value for key, value in kwargs.items()}
                result = func(
                    *_swap(args, replaced), **dict(zip(on_meta, _swap(tuple(on_meta.values()), replaced), strict=True))
                )
            made = flat_tensors([result], [])
            sizes = {_storage_id(tensor): storage_of(tensor).nbytes() for tensor in made}
            size = sum(self._rounded(nbytes) for key, nbytes in sizes.items() if key not in given)
        except Exception:
            size = sum(self._rounded(tensor.numel() * tensor.element_size()) for tensor in tensors)
        wants_more = self.device.type == "cuda" and "conv" in func.overloadpacket.__name__
        return size, size if wants_more else 0


def _key(values: Sequence[Any]) -> Hashable:
    found: list[Hashable] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append((value.shape, value.stride(), value.dtype, value.device))
        elif isinstance(value, list | tuple):
            found.append(_key(value))
        else:
            found.append(value if value.__hash__ is not None else repr(value))
    return tuple(found)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _swap(values: Sequence[Any], replaced: Any) -> tuple[Any, ...]:
    """The same arguments with each tensor replaced by the next one."""
    return tuple(
        next(replaced)
        if isinstance(value, torch.Tensor)
        else type(value)(_swap(value, replaced))
        if isinstance(value, list | tuple)
        else value
        for value in values
    )


def _storage_id(tensor: torch.Tensor) -> int:
    return int(storage_of(tensor)._cdata)
