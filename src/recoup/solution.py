"""What every planner answers with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from recoup.graph import Graph
from recoup.schedule import Schedule
from recoup.task import Scope
from recoup.units import format_bytes

Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True)
class Solution:
    """A schedule with its judged cost and peak, and what is proven about it.

    ``status``: ``optimal`` (no schedule in ``scope`` is cheaper), ``feasible``, ``infeasible`` (none in ``scope`` fits)
    or ``unknown``. ``scope``: ``any`` schedule with the graph's first-run order, or ``stage-once``, the paper's class:
    each op at most once per stage, in order. ``smallest_budget`` and ``budget_bound`` are filled in when there is no
    schedule: a budget that is known to work, and one below which nothing does.
    """

    status: Status
    scope: Scope
    method: str
    graph: Graph
    schedule: Schedule | None
    cost: float | None
    peak_bytes: int | None
    base_cost: float
    base_peak_bytes: int
    budget_bytes: int | None
    lower_bound: float | None
    seconds: float
    seed: int
    message: str = ""
    smallest_budget: int | None = None
    budget_bound: int | None = None
    interrupted: bool = False

    @property
    def overhead(self) -> float | None:
        """Cost over the cost of running every op once, less 1."""
        if self.cost is None:
            return None
        return self.cost / self.base_cost - 1 if self.base_cost else 0.0

    @property
    def gap(self) -> float | None:
        """How far the cost can be from the best in scope, as a share of the cost."""
        if self.cost is None or self.lower_bound is None:
            return None
        return max(0.0, (self.cost - self.lower_bound) / self.cost) if self.cost else 0.0

    def why(self) -> str:
        """One sentence: what happened, and what to do if nothing was found."""
        parts = [self.message] if self.message else []
        if self.budget_bound is not None and self.smallest_budget is not None:
            parts.append(
                f"needs at least {format_bytes(self.budget_bound)}; {format_bytes(self.smallest_budget, up=True)} works"
            )
        if self.interrupted:
            parts.append("interrupted")
        return "; ".join(parts)

    def to_data(self) -> dict[str, Any]:
        """What ``recoup solve --json`` prints."""
        return {
            "status": self.status,
            "scope": self.scope,
            "method": self.method,
            "cost": self.cost,
            "base_cost": self.base_cost,
            "overhead": self.overhead,
            "peak_bytes": self.peak_bytes,
            "budget_bytes": self.budget_bytes,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "seconds": round(self.seconds, 3),
            "schedule": None if self.schedule is None else self.schedule.steps(),
        }
