"""Gurobi, if ``gurobipy`` is installed (``pip install gurobipy``); its licence is the user's affair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from recoup.errors import MethodError
from recoup.solvers.program import Answer, Floats, Program


class Gurobi:
    """See :class:`recoup.solvers.program.Solver`."""

    name = "gurobi"

    def __init__(self) -> None:
        try:
            import gurobipy
        except ImportError:
            raise MethodError("gurobi needs gurobipy: pip install gurobipy, or use solver='highs'") from None
        self.gurobi: Any = gurobipy

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
        """Solve with Gurobi."""
        g = self.gurobi
        if beside is not None:
            beside(lambda: False)
        with g.Env(empty=True) as environment:
            environment.setParam("OutputFlag", 0)
            environment.start()
            with g.Model(env=environment) as model:
                x = _columns(g, model, program, relax)
                if time_limit is not None:
                    model.Params.TimeLimit = time_limit
                model.Params.MIPGap, model.Params.Seed = gap, seed
                model.Params.FeasibilityTol = model.Params.IntFeasTol = 1e-9
                if start is not None and not relax:
                    x.Start = start

                def listen(model: Any, where: int) -> None:
                    if stopped():
                        model.terminate()
                    if where == g.GRB.Callback.MIP and progress is not None:
                        bound, best = g.GRB.Callback.MIP_OBJBND, g.GRB.Callback.MIP_OBJBST
                        progress(model.cbGet(bound), model.cbGet(best))
                    if where == g.GRB.Callback.MIPSOL and found is not None:
                        found(np.asarray(model.cbGetSolution(x), dtype=np.float64))

                try:
                    model.optimize(listen)
                except g.GurobiError as problem:
                    raise MethodError(f"gurobi: {problem}") from problem
                return _answer(g, model, x, relax)


def _columns(g: Any, model: Any, program: Program, relax: bool) -> Any:
    kinds = [g.GRB.INTEGER if flag and not relax else g.GRB.CONTINUOUS for flag in program.integer]
    x = model.addMVar(len(program.cost), lb=program.lower, ub=program.upper, obj=program.cost, vtype=kinds)
    columns = x.tolist()
    for row, (low, high) in enumerate(zip(program.row_lower, program.row_upper, strict=True)):
        part = slice(program.start[row], program.start[row + 1])
        terms = g.LinExpr(program.value[part], [columns[i] for i in program.index[part]])
        if low == high:
            model.addLConstr(terms, "=", low)
            continue
        if np.isfinite(low):
            model.addLConstr(terms, ">", low)
        if np.isfinite(high):
            model.addLConstr(terms, "<", high)
    return x


def _answer(g: Any, model: Any, x: Any, relax: bool) -> Answer:
    if model.Status in (g.GRB.INFEASIBLE, g.GRB.INF_OR_UNBD):
        return Answer("infeasible", None, np.inf, np.inf)
    solved = model.Status == g.GRB.OPTIMAL
    if model.SolCount == 0:
        return Answer("unknown", None, np.inf, -np.inf if relax else model.ObjBound)
    bound = model.ObjVal if relax else model.ObjBound
    if relax and not solved:
        return Answer("unknown", None, np.inf, -np.inf)
    return Answer("optimal" if solved else "feasible", np.asarray(x.X, dtype=np.float64), model.ObjVal, bound)
