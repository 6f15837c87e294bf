"""Contenders that run one training step, one after the other, each as if it were alone.

Each gets a fresh copy of the model and has the device to itself: what is kept for later (the weights the copies start
from, the gradients to compare) is kept where no count of live storages sees it.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from recoup.errors import CaptureError, RecoupError, RecoupWarning
from recoup.torch.hidden import Hidden
from recoup.torch.memory import measure_peak
from recoup.torch.optimizing import arguments
from recoup.torch.workload import SEED, Call, Workload

Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """What one contender took; None where it was not measured, and then the note says why."""

    name: str
    predicted_bytes: int | None = None
    peak_bytes: int | None = None
    seconds: float | None = None
    gradient_difference: float | None = None
    note: str = ""

    def to_data(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "name": self.name,
            "predicted_peak_bytes": self.predicted_bytes,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
            "gradient_difference": self.gradient_difference,
            "note": self.note,
        }


class Source:
    """The model as it was given, emptied of its weights, which every copy gets anew. Tied weights stay tied."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        self.work = work
        self.device = device
        self._weights = [Hidden.of(tensor) for tensor in _state(work.model)]
        for tensor in _state(work.model):
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=device)
            tensor.grad = None

    def model(self) -> nn.Module:
        """A fresh copy."""
        try:
            made = copy.deepcopy(self.work.model)
        except Exception as problem:
            raise CaptureError(
                f"the model cannot be copied, and each contender needs its own: {summary(problem)}"
            ) from problem
        for tensor, weight in zip(_state(made), self._weights, strict=True):
            tensor.data = weight.tensor(self.device)
        return made


@dataclass(frozen=True)
class Outcome:
    """A contender's row, and the gradients that its first step left."""

    row: Row
    gradients: list[Hidden | None] = field(default_factory=list)


@dataclass(frozen=True)
class Arena:
    """Runs contenders one after the other, each as if it were alone."""

    source: Source
    steps: int
    say: Say

    def run(
        self,
        name: str,
        prepare: Callable[[nn.Module], Call],
        around: AbstractContextManager[Any] | None = None,
        after: Callable[[Call], None] = lambda _call: None,
    ) -> Outcome:
        """Measure what ``prepare`` makes of a fresh model; failing is an outcome too, except for what is raised on
        purpose."""
        if name != "recoup":
            self.say(f"{name} ...")
        self._clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with around or nullcontext():
                    outcome = self._measure(name, prepare, after)
            except RecoupError:
                raise
            except torch.OutOfMemoryError:
                outcome = Outcome(Row(name, note="out of memory"))
            except Exception as problem:
                if name == "plain":
                    raise CaptureError(f"the step fails as it is: {summary(problem)}") from problem
                outcome = Outcome(Row(name, note=f"failed: {summary(problem)}"))
        notes = [str(entry.message) for entry in caught if issubclass(entry.category, RecoupWarning)]
        self._clear()
        self.say("")
        note = "; ".join([outcome.row.note] * bool(outcome.row.note) + list(dict.fromkeys(notes)))
        return replace(outcome, row=replace(outcome.row, note=note))

    def _measure(self, name: str, prepare: Callable[[nn.Module], Call], after: Callable[[Call], None]) -> Outcome:
        work, device = self.source.work, self.source.device
        model = self.source.model()
        leaves = work.leaves(model)
        call = prepare(model)
        args, kwargs = arguments(work.inputs)

        def clear() -> None:
            for leaf in leaves:
                leaf.grad = None

        def step() -> None:
            work.scalar(call(*args, **kwargs)).backward()

        clear()
        torch.manual_seed(SEED)
        step()
        after(call)
        gradients = [None if leaf.grad is None else Hidden.of(leaf.grad) for leaf in leaves]
        clear()
        peak = measure_peak(step, device)
        times = []
        for _ in range(self.steps):
            clear()
            _synchronize(device)
            start = time.perf_counter()
            step()
            _synchronize(device)
            times.append(time.perf_counter() - start)
        clear()
        return Outcome(Row(name, None, peak, statistics.median(times)), gradients)

    def _clear(self) -> None:
        torch.compiler.reset()
        gc.collect()
        if self.source.device.type == "cuda":
            torch.cuda.empty_cache()


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(problem: BaseException) -> str:
    """An error of any kind in one line: its type and its first two lines, since Dynamo says in the second why."""
    lines = [line.strip() for line in str(problem).strip().splitlines()[:2]]
    return f"{type(problem).__name__}: {' '.join(lines)}"[:200]
