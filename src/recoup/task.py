"""What a planner is given, and where it puts what it finds.

A planner offers schedules to its task. The task has the judge look at each, keeps the best that stays within budget,
and knows when to stop; so whatever interrupts a planner, the best so far is there, and nothing over budget ever is.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Literal

from recoup.graph import Graph
from recoup.judge import Simulation, simulate
from recoup.schedule import Schedule

Scope = Literal["any", "stage-once"]


class NotApplicableError(Exception):
    """The method cannot be used on this graph; the text says why."""


@dataclass(frozen=True)
class Progress:
    """A planner's state while it works; None where there is nothing yet."""

    method: str
    seconds: float
    bound: float | None
    incumbent: float | None
    cuts: int | None = None  # moments at which the default planner looks at memory


@dataclass
class Clock:
    """A deadline and an interrupt flag, asked often."""

    limit: float | None
    parent: Clock | None = None  # stops this one too
    began: float = field(default_factory=time.monotonic)
    interrupted: bool = False

    def seconds(self) -> float:
        """Since the clock was started."""
        return time.monotonic() - self.began

    def left(self) -> float | None:
        """Seconds until the deadline; None if there is none."""
        return None if self.limit is None else max(0.0, self.limit - self.seconds())

    def stopped(self) -> bool:
        """Whether to return with what there is."""
        if self.interrupted or (self.limit is not None and self.seconds() >= self.limit):
            return True
        return self.parent is not None and self.parent.stopped()

    def share(self, parts: int) -> Clock:
        """A clock for one of so many equal parts of what is left."""
        left = self.left()
        return Clock(None if left is None else left / parts, parent=self)

    @contextmanager
    def catching_ctrl_c(self) -> Iterator[None]:
        """The first Ctrl-C stops the clock, a second one is Python's own; only the main thread can do this."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGINT)

        def stop(number: int, frame: FrameType | None) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@dataclass
class Task:
    """A graph, a budget, how to search, and the best schedule so far."""

    graph: Graph
    budget: int | None
    method: str
    clock: Clock
    gap: float = 0.0
    seed: int = 0
    solver: str = "highs"
    listener: Callable[[Progress], None] | None = None
    start: Schedule | None = None  # a schedule to begin from, within budget or not
    cost_limit: float | None = None  # equation (10): nothing dearer is accepted
    smallest: bool = False  # look for the smallest peak instead of the smallest cost
    best: Simulation | None = None
    least_peak: int | None = None  # of all schedules offered, within budget or not
    bound: float | None = None
    cuts: int | None = None

    def offer(self, schedule: Schedule) -> Simulation:
        """Judge a schedule and keep it if it is within budget and the best so far."""
        judged = simulate(self.graph, schedule)
        if self.least_peak is None or judged.peak_bytes < self.least_peak:
            self.least_peak = judged.peak_bytes
        if self.budget is not None and judged.peak_bytes > self.budget:
            return judged
        if self.cost_limit is not None and judged.cost > self.cost_limit:
            return judged
        if self.best is None or self._rank(judged) < self._rank(self.best):
            self.best = judged
            self.report()
        return judged

    def offer_all(self, schedules: Iterator[Schedule]) -> None:
        """Offer each schedule until the clock stops."""
        for schedule in schedules:
            self.offer(schedule)
            if self.clock.stopped():
                return

    def report(self, bound: float | None = None) -> None:
        """Tell whoever listens where the search stands; ``bound`` if a better one is known."""
        if bound is not None and (self.bound is None or bound > self.bound):
            self.bound = bound
        if self.listener is not None:
            cost = None if self.best is None else self.best.cost
            self.listener(Progress(self.method, self.clock.seconds(), self.bound, cost, self.cuts))

    def _rank(self, judged: Simulation) -> tuple[float, float]:
        rank = (judged.cost, judged.peak_bytes)
        return rank[::-1] if self.smallest else rank


@dataclass(frozen=True)
class Finding:
    """What a planner proved, besides the schedules it offered, and for which schedules it holds."""

    lower_bound: float | None = None
    infeasible: bool = False
    scope: Scope = "any"
    message: str = ""
