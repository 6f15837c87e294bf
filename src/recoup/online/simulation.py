"""A log under a budget: what DTR would have done, in one object."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from recoup.online import heuristics
from recoup.online.logs import Instruction
from recoup.online.plain import PlainRun
from recoup.online.replay import replay
from recoup.online.simulator import Deallocation, OutOfMemory, Simulator, Thrashing
from recoup.units import Budget, resolve_budget

Status = Literal["ok", "oom", "thrash"]


@dataclass(frozen=True)
class Outcome:
    """How a simulated run ended. Costs are in the log's own unit; ``overhead`` is total over base cost, less 1."""

    status: Status
    heuristic: str
    total_cost: float
    base_cost: float
    rematerializations: int
    remat_cost: float
    peak_bytes: int
    budget_bytes: int | None
    evictions: int
    accesses: int
    seconds: float
    message: str = ""

    @property
    def overhead(self) -> float | None:
        """What recomputation added, as a share; None if the run did not end."""
        if self.status != "ok":
            return None
        return self.total_cost / self.base_cost - 1 if self.base_cost else 0.0

    def to_data(self) -> dict[str, Any]:
        """What ``recoup dtr --json`` prints."""
        return {
            "status": self.status,
            "total_cost": self.total_cost,
            "base_cost": self.base_cost,
            "overhead": self.overhead,
            "rematerializations": self.rematerializations,
            "remat_cost": self.remat_cost,
            "peak_bytes": self.peak_bytes,
            "budget_bytes": self.budget_bytes,
            "evictions": self.evictions,
            "accesses": self.accesses,
            "seconds": round(self.seconds, 3),
        }


def baseline_peak(log: Sequence[Instruction]) -> int:
    """The most bytes that the program itself holds, constants included."""
    run = PlainRun()
    replay(log, run)
    return run.peak


def simulate_log(
    log: Sequence[Instruction],
    budget: Budget = None,
    heuristic: str = "dtr",
    *,
    without: Collection[str] = (),
    deallocation: Deallocation = "eager",
    limit: float | None = 2.0,
    small: float = 0.0,
    sample: bool = False,
) -> Outcome:
    """Run a log under a budget: bytes, or a fraction of its :func:`baseline_peak`; None sets no limit.

    ``without`` names measures that the heuristic leaves out: cost, size or staleness. ``limit`` ends a run whose total
    cost exceeds that multiple of the base cost (the paper's simulations used 3). ``small`` and ``sample`` make choices
    faster and worse, as in :func:`recoup.online.heuristics.make`.
    """
    is_share = budget is not None and not isinstance(budget, int)
    room = resolve_budget(budget, baseline_peak(log) if is_share else 0)
    run = Simulator(room, heuristics.make(heuristic, without, small=small, sample=sample), deallocation, limit)
    status: Status = "ok"
    message = ""
    start = time.perf_counter()
    try:
        replay(log, run)
    except OutOfMemory as problem:
        status, message = "oom", str(problem)
    except Thrashing as problem:
        status, message = "thrash", str(problem)
    return Outcome(
        status=status,
        heuristic=heuristic + (f" without {', '.join(without)}" if without else ""),
        total_cost=run.total_cost,
        base_cost=run.base_cost,
        rematerializations=run.rematerializations,
        remat_cost=run.remat_cost,
        peak_bytes=run.peak,
        budget_bytes=room,
        evictions=run.evictions,
        accesses=run.heuristic.accesses,
        seconds=time.perf_counter() - start,
        message=message,
    )
