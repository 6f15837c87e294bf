"""HiGHS, the embedded solver.

It runs in a thread of its own while this one waits in short naps: HiGHS releases the interpreter lock, so Ctrl-C and
the time limit are seen here, and its own interrupt callback passes them on. HiGHS may call it seldom, and for a minute
inside presolve or a root heuristic not at all; then the thread is left behind, to stop at its next callback, and the
answer is what it had told until then.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any

import highspy
import numpy as np

from recoup.solvers.program import Answer, Floats, Program

_TOLERANCE = 1e-9
GRACE = 1.0  # seconds between asking the engine to stop and leaving it behind
_LEFT_BEHIND: list[threading.Thread] = []


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
        beside: Callable[[Callable[[], bool]], None] | None = None,
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
        run = _Run(engine, time_limit, stopped, progress, found)
        run.start()
        if beside is not None:
            beside(run.thread.is_alive)
        if not run.wait():
            return Answer("unknown" if run.x is None else "feasible", run.x, run.objective, run.bound)
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


class _Run:
    """One run of the engine in a thread, and what it has told so far."""

    def __init__(
        self,
        engine: Any,
        time_limit: float | None,
        stopped: Callable[[], bool],
        progress: Callable[[float, float], None] | None,
        found: Callable[[Floats], None] | None,
    ) -> None:
        self.engine, self.stopped, self.progress, self.found = engine, stopped, progress, found
        self.deadline = None if time_limit is None else time.monotonic() + time_limit
        self.x: Floats | None = None
        self.objective, self.bound = np.inf, -np.inf
        self.closed = False
        self.thread = threading.Thread(target=engine.run, daemon=True)

    def start(self) -> None:
        kinds = highspy.cb.HighsCallbackType
        self.engine.setCallback(self._listen, None)
        for kind in (
            kinds.kCallbackMipInterrupt,
            kinds.kCallbackSimplexInterrupt,
            kinds.kCallbackIpmInterrupt,
            kinds.kCallbackMipImprovingSolution,
        ):
            self.engine.startCallback(kind)
        self.thread.start()

    def wait(self) -> bool:
        """Wait for the end; False if it did not come in time, and the thread was left behind."""
        over: float | None = None
        while self.thread.is_alive():
            self.thread.join(0.05)
            if over is None and self._should_stop():
                over = time.monotonic()
            if over is not None and self.thread.is_alive() and time.monotonic() - over > GRACE:
                self.closed = True
                _LEFT_BEHIND.append(self.thread)
                return False
        return True

    def _should_stop(self) -> bool:
        return self.closed or self.stopped() or (self.deadline is not None and time.monotonic() > self.deadline)

    def _listen(self, kind: Any, message: str, out: Any, into: Any, data: Any) -> None:
        kinds = highspy.cb.HighsCallbackType
        if self.closed:
            into.user_interrupt = 1
            return
        if kind == kinds.kCallbackMipImprovingSolution:
            self.x = np.array(out.mip_solution, dtype=np.float64)
            self.objective = float(out.objective_function_value)
            if self.found is not None:
                self.found(self.x)
            return
        if kind == kinds.kCallbackMipInterrupt:
            self.bound = max(self.bound, float(out.mip_dual_bound))
            if self.progress is not None:
                self.progress(float(out.mip_dual_bound), float(out.mip_primal_bound))
        if self._should_stop():
            into.user_interrupt = 1


@atexit.register
def _join() -> None:
    """Python must not end while the engine could still call back into it: its threads would abort the process."""
    for thread in _LEFT_BEHIND:
        thread.join(60.0)


def _answer(engine: Any, relaxed: bool) -> Answer:
    status, info = engine.getModelStatus(), engine.getInfo()
    kinds = highspy.HighsModelStatus
    if status == kinds.kModelEmpty:
        return Answer("optimal", np.zeros(0), 0.0, 0.0)
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
