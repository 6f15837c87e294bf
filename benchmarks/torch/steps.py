"""One training step to measure: which model, in which mode, by whom, and what it took."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.torch.memory import measure_peak
from recoup.torch.models import Example, example
from recoup.torch.settings import Mode

GIB = 2**30
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
    budget_bytes: int | None = None
    predicted_bytes: int | None = None

    def row(self) -> str:
        """One line for people."""
        line = f"{self.model:10} {self.contender:26} {1000 * self.seconds:8.2f} ms {self.peak_bytes / GIB:8.3f} GiB"
        line += f"   reserved {self.reserved_bytes / GIB:6.2f}   first step {self.first_step_seconds:5.1f} s"
        if self.budget_bytes is not None and self.predicted_bytes is not None:
            error = self.predicted_bytes / self.peak_bytes - 1
            line += f"   budget {self.budget_bytes / GIB:.3f}"
            line += f"   predicted {self.predicted_bytes / GIB:.3f} ({error:+.2%})"
            line += "" if self.peak_bytes <= self.budget_bytes else "   OVER BUDGET"
        return line

    def data(self) -> dict[str, Any]:
        """For a results file."""
        return asdict(self)


def build(name: str, size: str, device: torch.device) -> Example:
    """The same model and data every time."""
    torch.manual_seed(0)
    return example(name, size, device=device)  # type: ignore[arg-type]


def checkpoint_blocks(made: Example) -> None:
    """``torch.utils.checkpoint`` on every block, as a user would put it."""
    for block in made.model.blocks():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def measure(name: str, contender: str, made: Example, device: torch.device, steps: int = 10) -> Measured:
    """Run a few steps of forward, loss and backward; parameters keep no gradient in between."""
    step = partial(_step, name, made, device)
    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    peak = measure_peak(step, device)
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return Measured(name, contender, statistics.median(times), peak, reserved, first)


def _step(name: str, made: Example, device: torch.device) -> None:
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=name in AUTOCAST):
        loss = made.loss(made.model(*made.inputs))
    loss.backward()
    made.model.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def planned(name: str, made: Example, device: torch.device, budget: int, mode: Mode, time_limit: float) -> Measured:
    """recoup's step within ``budget`` bytes."""
    recoup.optimize(made.model, budget=budget, compile=mode, time_limit=time_limit)
    took = measure(name, f"recoup {mode}", made, device)
    predicted = max(plan.peak_bytes for plan in recoup.plans(made.model))
    return Measured(**(took.data() | {"budget_bytes": budget, "predicted_bytes": predicted}))


def forget() -> None:
    """Nothing of one contender is left for the next."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
