import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup import Graph, GraphBuilder, Implementation, Schedule, ScheduleError, simulate, solve, solving
from recoup.generators import NETWORKS, chain, random_training, residual, unet_like
from recoup.planners import dtr
from recoup.planners.cuts import CutProgram
from recoup.planners.floor import memory_floor
from recoup.planners.optimal import Search
from recoup.solvers import get
from recoup.task import Clock, Task
from tests.exact import cheapest
from tests.strategies import graphs


def budgets(draw: st.DrawFn, graph: Graph) -> int:
    plain = simulate(graph, Schedule.default(graph)).peak_bytes
    floor = memory_floor(graph).bytes
    return draw(st.integers(max(0, floor - 1), max(plain, floor)))


def check(graph: Graph, budget: int, solution) -> None:
    best = cheapest(graph, budget)
    assert solution.scope == "any"
    if solution.schedule is not None:
        judged = simulate(graph, solution.schedule)
        assert (judged.cost, judged.peak_bytes) == (solution.cost, solution.peak_bytes)
        assert judged.peak_bytes <= budget
        assert solution.lower_bound <= best <= solution.cost
    if solution.status == "optimal":
        assert solution.cost == best
    if solution.status == "infeasible":
        assert math.isinf(best)
    if math.isinf(best):
        assert solution.schedule is None


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_agrees_with_brute_force(data):
    graph = data.draw(graphs() | graphs(overwrite=True))
    budget = budgets(data.draw, graph)
    check(graph, budget, solve(graph, budget, "optimal", gap=0, time_limit=None))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_agrees_with_brute_force_when_implementations_are_chosen(data):
    graph = data.draw(graphs(choices=True, max_ops=7))
    budget = budgets(data.draw, graph)
    check(graph, budget, solve(graph, budget, "optimal", gap=0, time_limit=None))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_relaxation_never_exceeds_brute_force_whatever_the_cuts(data):
    graph = data.draw(graphs(choices=True, max_ops=6))
    budget = budgets(data.draw, graph)
    must = [i for i, op in enumerate(graph.ops) if not op.optional]
    if not must or budget < memory_floor(graph).bytes:
        return
    cuts = sorted(data.draw(st.sets(st.sampled_from(must), min_size=1)))
    watched = sorted(data.draw(st.sets(st.integers(0, len(graph.ops) - 1))))
    program = CutProgram(graph, budget - graph.resident_bytes, cuts, watched, watched)
    answer = get("highs").solve(program.program)
    best = cheapest(graph, budget)
    assert answer.status == "infeasible" or answer.bound * program.time_unit <= best * (1 + 1e-6) + 1e-6
    if answer.status == "infeasible":
        assert math.isinf(best)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_choosing_jointly_is_never_worse_than_choosing_after(data):
    graph = data.draw(graphs(choices=True))
    budget = budgets(data.draw, graph)
    first = solve(graph.without_choices(), budget, gap=0, time_limit=None)
    joint = solve(graph, budget, gap=0, time_limit=None)
    if first.schedule is None:
        return
    steps = first.schedule.steps()
    after = simulate(graph, steps).cost
    for position, name in enumerate(steps):
        for impl in graph.ops[graph.op_index[name if isinstance(name, str) else name[0]]].implementations[1:]:
            changed = [*steps[:position], (name, impl.name), *steps[position + 1 :]]
            try:
                judged = simulate(graph, changed)
            except ScheduleError:
                continue
            if judged.peak_bytes <= budget and judged.cost < after:
                steps, after = changed, judged.cost
                break
    assert joint.cost <= after


@pytest.mark.parametrize("layers", range(1, 9))
def test_chains(layers):
    graph = chain(layers)
    for budget in range(3, layers + 3):
        check(graph, budget, solve(graph, budget, gap=0, time_limit=4))


@pytest.mark.parametrize("graph", [residual(3), unet_like(3), random_training(12, 1), random_training(12, 2)])
def test_never_worse_than_other_planners(graph, monkeypatch):
    monkeypatch.setattr(solving, "_with_smallest_budget", lambda solution: solution)  # nobody reads it here
    plain, floor = simulate(graph, Schedule.default(graph)).peak_bytes, memory_floor(graph).bytes
    for share in (0.7, 0.4, 0.2):
        budget = int(floor + share * (plain - floor))
        best = solve(graph, budget, "optimal", gap=0, time_limit=5)
        for method in ("rounding", "ap-greedy", "linearized-greedy", "checkpoint-last"):
            other = solve(graph, budget, method)
            assert other.cost is None or best.cost <= other.cost


def test_choosing_jointly_beats_choosing_after():
    # Planned with the first implementations, y is kept; with the one that reads z instead, y may go.
    b = GraphBuilder()
    for name, size in (("y", 6), ("z", 2), ("w", 6), ("g", 1), ("h", 1)):
        b.value(name, size)
    b.op("make", outputs=["y"], time=5)
    b.op("shrink", inputs=["y"], outputs=["z"], time=1)
    b.op("wide", inputs=["z"], outputs=["w"], time=1)
    b.op("fold", inputs=["w"], outputs=["g"], time=1)
    either = [
        Implementation(("y", "g"), ("h",), 1, name="from y"),
        Implementation(("z", "g"), ("h",), 2, name="from z"),
    ]
    b.op("back", implementations=either, phase="backward")
    graph = b.build()
    solution = solve(graph, 9)
    assert (solution.status, solution.cost) == ("optimal", 10)
    assert ("back", "from z") in solution.schedule.steps()
    assert solve(graph, 9, "checkmate").cost > 10


def test_optional_ops_run_only_where_they_pay():
    # Packing y into p and unpacking costs less than making y again.
    b = GraphBuilder()
    for name, size in (("y", 8), ("p", 1), ("u", 8), ("w", 8), ("e", 1)):
        b.value(name, size)
    b.op("make", outputs=["y"], time=20)
    b.op("pack", inputs=["y"], outputs=["p"], time=1, optional=True)
    b.op("wide", inputs=["y"], outputs=["w"], time=1)
    b.op("narrow", inputs=["w"], outputs={"n": 1}, time=1)
    b.op("wide2", inputs=["n"], outputs={"w2": 8, "m": 1}, time=1)
    b.op("unpack", inputs=["p"], outputs=["u"], time=1, optional=True)
    end = [Implementation(("y", "m"), ("e",), 1, name="plain"), Implementation(("u", "m"), ("e",), 1, name="unpacked")]
    b.op("end", implementations=end, phase="backward")
    graph = b.build()
    tight = solve(graph, 17, gap=0)
    assert (tight.status, tight.cost) == ("optimal", cheapest(graph, 17))
    assert solve(graph, 30).cost == 24


def test_the_gap_is_honoured_and_the_answer_repeatable():
    graph = NETWORKS["resnet50"](64)
    one, two = (solve(graph, 0.5) for _ in range(2))
    assert one.gap <= 0.005
    assert one.schedule == two.schedule
    assert one.lower_bound == two.lower_bound


def test_infeasible_is_proven_or_answered_with_a_budget():
    graph = random_training(10, 4)
    floor = memory_floor(graph).bytes
    below = solve(graph, floor - 1)
    assert (below.status, below.scope) == ("infeasible", "any")
    assert below.budget_bound == floor
    assert solve(graph, below.smallest_budget).schedule is not None


def test_without_a_budget_the_fastest_implementations_win():
    b = GraphBuilder()
    b.value("y", 4)
    b.op(
        "a",
        implementations=[Implementation((), ("y",), 5, name="slow"), Implementation((), ("y",), 2, 99, name="fast")],
    )
    graph = b.build()
    assert solve(graph, None).cost == 2
    assert solve(graph, 10).cost == 5


def started(graph: Graph, budget: int) -> Task:
    """Where the search begins, before anything is solved."""
    task = Task(graph, budget, "optimal", Clock(None))
    Search(task).start(task.offer(Schedule.default(graph)))
    return task


def test_dtr_is_a_start_where_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = NETWORKS["unet"](8)
    budget = simulate(graph, Schedule.default(graph)).peak_bytes // 2
    best = started(graph, budget).best
    monkeypatch.setattr(Search, "offer_online", lambda self: None)
    without = started(graph, budget).best
    assert best is not None
    assert without is not None
    assert best.cost < 0.97 * without.cost


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_costs_no_more_than_dtr_from_the_start(data):
    graph = data.draw(graphs(max_ops=10))
    budget = budgets(data.draw, graph)
    best = started(graph, budget).best
    for schedule in dtr.starts(graph, budget):
        judged = simulate(graph, schedule)
        assert judged.peak_bytes > budget or (best is not None and best.cost <= judged.cost)
