"""HiGHS, the embedded solver.

It runs in a thread of its own while this one waits in short naps: HiGHS releases the interpreter lock, so Ctrl-C and
the time limit are seen here, and its own interrupt callback passes them on. HiGHS can overrun its time limit inside a
large root LP; the callback is the hard stop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import highspy
import numpy as np

from recoup.solvers.program import Answer, Floats, Program

_TOLERANCE = 1e-9


class Highs:
    """See :class:`recoup.solvers.program.Solver`."""

    name = "highs"

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
        beside: Callable[[], None] | None = None,
    ) -> Answer:
        """Solve with HiGHS."""
        engine: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        options = {
            "output_flag": False,
            "random_seed": seed,
            "threads": 1,
            "mip_rel_gap": gap,
            "mip_abs_gap": 0.0 if gap else 1e-7,
            "primal_feasibility_tolerance": _TOLERANCE,
            "dual_feasibility_tolerance": _TOLERANCE,
            "mip_feasibility_tolerance": _TOLERANCE,
        }
        if time_limit is not None:
            options["time_limit"] = max(0.0, time_limit)
        for key, setting in options.items():
            engine.setOptionValue(key, setting)
        engine.passModel(_model(program, relax))
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = list(start)
            engine.setSolution(solution)
        _run(engine, time_limit, stopped, progress, found, beside)
        return _answer(engine, relax or not any(program.integer))


def _model(program: Program, relax: bool) -> Any:
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.cost), len(program.row_lower)
    lp.col_cost_ = np.array(program.cost, dtype=np.float64)
    lp.col_lower_ = np.array(program.lower, dtype=np.float64)
    lp.col_upper_ = np.array(program.upper, dtype=np.float64)
    lp.row_lower_ = np.array(program.row_lower, dtype=np.float64)
    lp.row_upper_ = np.array(program.row_upper, dtype=np.float64)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(program.start, dtype=np.int32)
    lp.a_matrix_.index_ = np.array(program.index, dtype=np.int32)
    lp.a_matrix_.value_ = np.array(program.value, dtype=np.float64)
    if not relax and any(program.integer):
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[flag] for flag in program.integer]
    return lp


def _run(
    engine: Any,
    time_limit: float | None,
    stopped: Callable[[], bool],
    progress: Callable[[float, float], None] | None,
    found: Callable[[Floats], None] | None,
    beside: Callable[[], None] | None,
) -> None:
    deadline = None if time_limit is None else time.monotonic() + time_limit
    kinds = highspy.cb.HighsCallbackType

    def listen(kind: Any, message: str, out: Any, into: Any, data: Any) -> None:
        if kind == kinds.kCallbackMipImprovingSolution:
            if found is not None:
                found(np.array(out.mip_solution, dtype=np.float64))
            return
        if progress is not None and kind == kinds.kCallbackMipInterrupt:
            progress(float(out.mip_dual_bound), float(out.mip_primal_bound))
        if stopped() or (deadline is not None and time.monotonic() > deadline):
            into.user_interrupt = 1

    engine.setCallback(listen, None)
    for kind in (
        kinds.kCallbackMipInterrupt,
        kinds.kCallbackSimplexInterrupt,
        kinds.kCallbackIpmInterrupt,
        kinds.kCallbackMipImprovingSolution,
    ):
        engine.startCallback(kind)
    worker = threading.Thread(target=engine.run, daemon=True)
    worker.start()
    if beside is not None:
        beside()
    while worker.is_alive():
        worker.join(0.05)


def _answer(engine: Any, relaxed: bool) -> Answer:
    status, info = engine.getModelStatus(), engine.getInfo()
    kinds = highspy.HighsModelStatus
    if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
        return Answer("infeasible", None, np.inf, np.inf)
    feasible = info.primal_solution_status == 2
    if relaxed:
        if status != kinds.kOptimal:
            return Answer("unknown", None, np.inf, -np.inf)
        bound = info.objective_function_value
    else:
        bound = info.mip_dual_bound
    x = np.array(engine.getSolution().col_value, dtype=np.float64) if feasible else None
    objective = info.objective_function_value if feasible else np.inf
    if status == kinds.kOptimal:
        return Answer("optimal", x, objective, bound)
    return Answer("feasible" if feasible else "unknown", x, objective, bound)
