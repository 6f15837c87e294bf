import importlib.util
import os
import signal
import threading
import time

import numpy as np
import pytest

from recoup import MethodError, solve
from recoup.generators import NETWORKS, chain
from recoup.planners.stages import StageProgram
from recoup.solvers import NAMES, Program, get


def knapsack() -> Program:
    p = Program()
    columns = [p.column(-value) for value in (10.0, 6.0, 4.0)]
    p.row(zip(columns, (5.0, 4.0, 3.0), strict=True), upper=8.0)
    return p


@pytest.fixture(params=NAMES)
def solver(request):
    try:
        return get(request.param)
    except MethodError as problem:
        pytest.skip(str(problem))


def test_integer_and_relaxed(solver):
    answer = solver.solve(knapsack())
    assert (answer.status, answer.objective) == ("optimal", pytest.approx(-14))
    assert np.round(answer.x).tolist() == [1, 0, 1]
    relaxed = solver.solve(knapsack(), relax=True)
    assert relaxed.bound == pytest.approx(-14.5)


def test_infeasible(solver):
    p = knapsack()
    p.row([(0, 1.0)], lower=2.0)
    assert solver.solve(p).status == "infeasible"
    assert solver.solve(p, relax=True).status == "infeasible"


def test_start_is_used_and_points_are_heard(solver):
    stage = StageProgram(chain(6), 4, True)
    heard = []
    first = solver.solve(stage.program, found=heard.append)
    assert first.objective == pytest.approx(18)
    again = solver.solve(stage.program, start=first.x, gap=0.9)
    assert again.objective == pytest.approx(18)
    assert heard


def test_gurobi_agrees_with_highs():
    if importlib.util.find_spec("gurobipy") is None:
        pytest.skip("gurobipy is not installed")
    assert solve(chain(6), 4, solver="gurobi").cost == solve(chain(6), 4).cost == 18


@pytest.mark.parametrize("name", ["mobilenet", "resnet50"])
def test_stopping_from_outside(name):
    graph = NETWORKS[name](4)
    stage = StageProgram(graph, graph.resident_bytes + 200_000_000, True)
    began = time.monotonic()
    answer = get("highs").solve(stage.program, stopped=lambda: time.monotonic() - began > 1.0)
    assert answer.status in ("unknown", "feasible")
    assert time.monotonic() - began < 4


def test_ctrl_c_returns_the_best_so_far():
    before = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        solution = solve(NETWORKS["mobilenet"](1), 0.7, "checkmate", time_limit=60)
    finally:
        timer.cancel()
    assert solution.interrupted
    assert solution.status == "feasible"
    assert solution.seconds < 20
    assert "interrupted" in solution.why()
    assert signal.getsignal(signal.SIGINT) is before
