"""A mixed-integer program as planners write it down, and what a solver says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Row = Iterable[tuple[int, float]]  # (column, coefficient) pairs; columns may repeat


@dataclass
class Program:
    """Minimise ``cost @ x`` subject to rows and bounds. Columns and rows are added, never changed."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    start: list[int] = field(default_factory=lambda: [0])
    index: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    def column(self, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0, integer: bool = True) -> int:
        """A new variable; binary unless told otherwise."""
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: Row, lower: float = -np.inf, upper: float = np.inf) -> None:
        """A new constraint ``lower <= terms <= upper``."""
        total: dict[int, float] = {}
        for column, coefficient in terms:
            total[column] = total.get(column, 0.0) + coefficient
        self.index += total.keys()
        self.value += total.values()
        self.start.append(len(self.index))
        self.row_lower.append(lower)
        self.row_upper.append(upper)


@dataclass(frozen=True)
class Answer:
    """What a solver found. ``bound`` is a proven lower bound on the optimum; ``x`` the best point, if any."""

    status: Literal["optimal", "feasible", "infeasible", "unknown"]
    x: Floats | None
    objective: float
    bound: float


class Solver(Protocol):
    """A back end. It must honour ``stopped`` within about a second, and return what it has."""

    name: str

    def solve(
        self,
        program: Program,
        *,
        relax: bool = False,
        time_limit: float | None = None,
        gap: float = 0.0,
        seed: int = 0,
        start: Floats | None = None,
        stopped: Callable[[], bool] = lambda: False,
        progress: Callable[[float, float], None] | None = None,
        found: Callable[[Floats], None] | None = None,
        beside: Callable[[Callable[[], bool]], None] | None = None,
    ) -> Answer:
        """Solve, or with ``relax`` the linear relaxation.

        ``gap`` is relative to the objective, ``start`` a feasible point to begin from. ``progress`` hears (bound, best
        objective) now and then, ``found`` each better point; both may be called from another thread. ``beside`` is
        called once, by this thread, with a function that says whether the solver is still running.
        """
        ...
