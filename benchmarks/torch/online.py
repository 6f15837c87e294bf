"""What DTR costs on live programs: with room for everything, with less online, and with less once it has learned."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import recoup
from benchmarks.torch.steps import ROOM, ROUNDS, SLACK, limit_process, seconds
from recoup.online.report import Report
from recoup.torch.memory import measure_peak
from recoup.torch.models import CifarResNet, example
from recoup.torch.models.dynamic import Tree, TreeLSTM

PATIENCE = 90.0  # seconds of training within which a step must have been learned
WARM, STEPS = 3, 4
FOLLOWED = 10  # steps that have followed a plan before one counts as learned

Step = Callable[[], None]


@dataclass(frozen=True)
class Ran:
    """A step: median seconds and peak, beside the plain seconds; what DTR did in it."""

    model: str
    what: str
    seconds: float
    peak: int
    plain_seconds: float
    budget: int | None = None
    did: str = ""

    def row(self) -> str:
        """One line for people."""
        line = f"{self.model:12} {self.what:12} {1000 * self.seconds:8.1f} ms   "
        line += f"{self.seconds / self.plain_seconds:.3f} of plain   peak {self.peak / 2**30:8.3f} GiB"
        if self.budget is not None:
            line += f" of {self.budget / 2**30:.3f}{'   OVER BUDGET' if self.peak > self.budget else ''}"
        return line + self.did


def runs(model: str, shares: list[float], size: str, device: torch.device, sample: bool) -> Iterator[Ran]:
    """Plain, under DTR with room for everything, and at each share of the plain peak online and learned.

    Last, a few steps in a process that may reserve no more than the budget and 5 %, where plain training must fail.
    """
    step = _step(model, size == "small", device)
    for _ in range(WARM):
        step()
    plain = measure_peak(step, device)
    base = _median(step, device)
    yield Ran(model, "plain", base, plain, base)
    with recoup.dtr(ROOM, device=device) as run:
        yield _measure(model, "full budget", step, device, base, run.report)
    for share in shares:
        budget = int(share * plain)
        for learn in (False, True):
            gc.collect()
            with recoup.dtr(budget, device=device, learn=learn, sample=sample) as run:
                begin = time.perf_counter()
                while learn and run.report.followed < FOLLOWED and time.perf_counter() - begin < PATIENCE:
                    step()
                yield _measure(model, f"{'learned' if learn else 'online'} {share:g}", step, device, base, run.report)
    if device.type == "cuda" and shares:
        print(f"{model:12} {_limited(step, int(min(shares) * plain), device)}", flush=True)


def _limited(step: _Training, budget: int, device: torch.device) -> str:
    """Does it train in a process that may reserve no more than the budget and 5 %?"""
    torch.cuda.empty_cache()
    limit_process(int((1 + SLACK) * budget))
    try:
        step()
        said = "trains without DTR"
    except torch.OutOfMemoryError:
        said = "without DTR: out of memory"
    step.clear()
    reserved = 0
    with recoup.dtr(budget, device=device, learn=False) as run:
        for _ in range(WARM):
            step()
            reserved = max(reserved, torch.cuda.max_memory_reserved(device))
    limit_process(ROOM)
    return (
        f"may reserve {1 + SLACK:g} of {budget / 2**30:.3f} GiB. {said}; with DTR: {WARM} steps, "
        f"peak {run.report.peak_bytes / 2**30:.3f}, reserved {reserved / 2**30:.3f} GiB{_exceeded(run.report)}"
    )


class _Training:
    """A whole training step: forward, backward, and SGD with momentum."""

    def __init__(self, net: nn.Module, loss: Callable[[], torch.Tensor]) -> None:
        self._loss = loss
        self._optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)

    def __call__(self) -> None:
        self._loss().backward()
        self._optimizer.step()
        self.clear()

    def clear(self) -> None:
        """Let go of what a step that failed left behind, too."""
        self._optimizer.zero_grad()


def _step(model: str, small: bool, device: torch.device) -> _Training:
    torch.manual_seed(0)
    if model == "treelstm":
        with torch.device(device):
            tree_net = TreeLSTM(width=16 if small else 1024, rows=16 if small else 1024)
        trees = [Tree.random(8 if small else 64, 50, seed) for seed in range(2)]
        return _Training(tree_net, lambda: tree_net(trees).square().mean())
    if model.startswith("cifar"):
        with torch.device(device):
            net = CifarResNet(int(model.removeprefix("cifar")))
            x, y = torch.randn(4 if small else 1024, 3, 32, 32), torch.randint(10, (4 if small else 1024,))
        return _Training(net, lambda: functional.cross_entropy(net(x), y))
    name, _, batch = model.partition(":")
    made = example(name, "small" if small else "full", int(batch) if batch and not small else None, device)
    return _Training(made.model, lambda: made.loss(made.model(*made.inputs)))


def _measure(model: str, what: str, step: Step, device: torch.device, base: float, report: Report) -> Ran:
    for _ in range(WARM):
        step()
    before = vars(report).copy()
    took = _median(step, device)
    count = ROUNDS * STEPS
    each = {name: (getattr(report, name) - value) / count for name, value in before.items() if name in _COUNTED}
    did = f"   {each['evictions']:.0f} evicted, {each['rematerializations']:.0f} repeated "
    did += f"({1000 * each['remat_seconds']:.1f} ms), search {1000 * each['search_seconds']:.1f} ms, "
    did += f"books {1000 * each['bookkeeping_seconds']:.1f} ms"
    did += f", followed {each['followed']:.1f}" + _exceeded(report)
    did += f", highest ever {report.peak_bytes / 2**30:.3f}"
    peak = measure_peak(step, device) if device.type == "cuda" else report.peak_bytes
    return Ran(model, what, took, peak, base, report.budget_bytes if report.budget_bytes < ROOM else None, did)


def _exceeded(report: Report) -> str:
    return f", exceeded by {report.exceeded}" if report.exceeded else ""


def _median(step: Step, device: torch.device) -> float:
    return statistics.median(seconds(step, device, STEPS) for _ in range(ROUNDS))


_COUNTED = ("evictions", "rematerializations", "followed", "remat_seconds", "search_seconds", "bookkeeping_seconds")
