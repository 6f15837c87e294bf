"""Integer programs and who solves them: one narrow interface, HiGHS behind it, others if installed."""

from __future__ import annotations

from recoup.errors import MethodError
from recoup.solvers.program import Answer, Program, Row, Solver

__all__ = ["NAMES", "Answer", "Program", "Row", "Solver", "get"]

NAMES = ("highs", "gurobi")


def get(name: str) -> Solver:
    """The solver called ``name``; imports it only now."""
    if name == "highs":
        from recoup.solvers.highs import Highs

        return Highs()
    if name == "gurobi":
        from recoup.solvers.gurobi import Gurobi

        return Gurobi()
    raise MethodError(f"there is no solver {name!r}; choose one of {', '.join(NAMES)}")
