"""One training step to measure: which model, in which mode, by whom, and what it took."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from functorch.compile import config as functorch_config  # type: ignore[import-untyped]

import recoup
from recoup.torch.memory import measure_peak
from recoup.torch.models import Example, example
from recoup.torch.settings import Mode
from recoup.torch.store import Where
from recoup.torch.workload import checkpoint_blocks

GIB = 2**30
ROUNDS, STEPS = 3, 10  # the median of so many rounds of so many steps
ROOM = 2**50  # a budget that everything fits in
SLACK = 0.05  # a limited process may reserve this much more than the budget
AUTOCAST = ("gpt", "llama")  # trained in bf16, the networks of convolutions in fp32


@dataclass(frozen=True)
class Measured:
    """A contender's step: seconds (median), bytes allocated and reserved at its peak, and what recoup had said."""

    model: str
    contender: str
    seconds: float
    peak_bytes: int
    reserved_bytes: int
    first_step_seconds: float
    cold_step_seconds: float | None = None
    """The first step's in the process that compiled everything, beside others."""
    budget_bytes: int | None = None
    predicted_bytes: int | None = None

    def row(self) -> str:
        """One line for people."""
        line = f"{self.model:10} {self.contender:22} {1000 * self.seconds:8.2f} ms {self.peak_bytes / GIB:8.3f} GiB"
        line += f"   reserved {self.reserved_bytes / GIB:6.2f}   first step {self.first_step_seconds:5.1f} s"
        line += "" if self.cold_step_seconds is None else f" (cold {self.cold_step_seconds:5.1f} s)"
        if self.budget_bytes is not None and self.predicted_bytes is not None:
            error = self.predicted_bytes / self.peak_bytes - 1
            line += f"   budget {self.budget_bytes / GIB:.3f}"
            line += f"   predicted {self.predicted_bytes / GIB:.3f} ({error:+.2%})"
            line += "" if self.peak_bytes <= self.budget_bytes else "   OVER BUDGET"
        return line

    def data(self) -> dict[str, Any]:
        """For a results file."""
        return asdict(self)


@dataclass(frozen=True)
class Contender:
    """Who runs the step of a model, and how: as it is, with checkpoints, with PyTorch's knob, or by recoup."""

    model: str
    size: str
    device: torch.device
    mode: Mode
    kind: str
    """``plain``, ``checkpoint``, ``knob=0.5``, or ``recoup=BYTES``."""
    time_limit: float = 15.0

    def measure(self, turn: Callable[[float], None] = lambda _: None) -> Measured:
        """Forward, loss and backward; parameters keep no gradient in between.

        ``turn`` is told the seconds of the first step, and waits until timing may begin.
        """
        torch.manual_seed(0)
        made = example(self.model, self.size, device=self.device)  # type: ignore[arg-type]
        name, _, value = self.kind.partition("=")
        knob = float(value) if name == "knob" else functorch_config.activation_memory_budget
        with functorch_config.patch(activation_memory_budget=knob):
            if name == "recoup":
                recoup.optimize(made.model, budget=int(value), compile=self.mode, time_limit=self.time_limit)
            else:
                if name == "checkpoint":
                    checkpoint_blocks(made.model)
                if self.mode == "inductor":
                    made.model.compile()
            step = partial(self._step, made)
            first = seconds(step, self.device, 1)
            step()
            turn(first)
            peak = measure_peak(step, self.device)
            reserved = torch.cuda.max_memory_reserved() if self.device.type == "cuda" else peak
            times = [seconds(step, self.device, STEPS) for _ in range(ROUNDS)]
        found = Measured(self.model, f"{name} {self.mode}", statistics.median(times), peak, reserved, first)
        if name != "recoup":
            return found
        predicted = max((plan.peak_bytes for plan in recoup.plans(made.model)), default=None)
        return Measured(**(found.data() | {"budget_bytes": int(value), "predicted_bytes": predicted}))

    def profile(self, cache: Where = True) -> None:
        """Measure the model's ops, so that every budget is planned from the same numbers, taken undisturbed."""
        torch.manual_seed(0)
        made = example(self.model, self.size, device=self.device)  # type: ignore[arg-type]
        with self._autocast():
            try:
                recoup.plan(made.model, made.inputs, 0.5, compile=self.mode, planner="checkpoint-all", cache=cache)
            except recoup.BudgetError:
                return  # no plan was wanted

    def _step(self, made: Example) -> None:
        with self._autocast():
            loss = made.loss(made.model(*made.inputs))
        loss.backward()
        made.model.zero_grad(set_to_none=True)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.model in AUTOCAST)


def seconds(step: Callable[[], None], device: torch.device, count: int) -> float:
    """Of one of ``count`` steps, the device waited for at their end as a training loop does, not after each."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / count


def limit_process(size: int) -> None:
    """Reserve no more than so many bytes of the GPU from now on."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, size / total), 0)
