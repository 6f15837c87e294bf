import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup import GraphBuilder, MethodError, Schedule, simulate, solve
from recoup.errors import SettingError
from recoup.generators import NETWORKS, chain, random_chain, random_training, residual, unet_like
from recoup.planners.articulation import articulation_points
from recoup.planners.floor import memory_floor
from recoup.planners.griewank import fewest_advances, stored_states
from recoup.planners.registry import METHODS
from recoup.planners.stages import StageProgram
from recoup.solvers import get
from tests.exact import cheapest, cheapest_stage_once, smallest_budget
from tests.strategies import graphs

HEURISTICS = [m.name for m in METHODS.values() if m.family]
FAST = [name for name in METHODS if name != "checkmate-unpartitioned"]


def check(solution, graph):
    """What holds for every answer, whoever gave it."""
    assert solution.status in ("optimal", "feasible", "infeasible", "unknown")
    if solution.schedule is None:
        assert solution.status in ("infeasible", "unknown")
        assert solution.cost is solution.peak_bytes is solution.gap is solution.overhead is None
        return
    judged = simulate(graph, solution.schedule)
    assert (solution.cost, solution.peak_bytes) == (judged.cost, judged.peak_bytes)
    if solution.budget_bytes is not None:
        assert judged.peak_bytes <= solution.budget_bytes
    assert solution.lower_bound <= solution.cost
    assert (solution.status == "optimal") == (solution.gap <= 1e-8)


# The numbers of the paper ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", range(1, 9))
def test_unit_chains_match_an_exact_search_at_every_budget(layers):
    graph = chain(layers)
    for budget in range(2, layers + 3):
        solution = solve(graph, budget, "checkmate", time_limit=None)
        check(solution, graph)
        best = cheapest(graph, budget)
        if math.isinf(best):
            assert solution.status == "infeasible"
            assert budget < 3
        else:
            assert (solution.status, solution.cost, solution.lower_bound) == ("optimal", best, best)


def test_the_papers_chain():
    graph = chain(8)
    assert solve(graph, 4, "checkmate").cost == 26
    relaxed = solve(graph, 4, "lp")
    assert relaxed.lower_bound == pytest.approx(22, abs=1e-6)
    assert (relaxed.status, relaxed.scope, relaxed.schedule) == ("unknown", "stage-once", None)
    free = StageProgram(graph, 4, partitioned=False)
    bound = get("highs").solve(free.program, relax=True).bound * free.time_unit
    assert bound == pytest.approx(1.206, abs=5e-4)
    assert 26 / relaxed.lower_bound == pytest.approx(1.18, abs=5e-3)
    assert 26 / bound == pytest.approx(21.56, abs=5e-3)


@pytest.mark.parametrize(("layers", "budget"), [(1, 3), (2, 3), (2, 4), (3, 4), (3, 5)])
def test_partitioned_and_unpartitioned_agree(layers, budget):
    graph = chain(layers)
    both = [solve(graph, budget, m, time_limit=None) for m in ("checkmate", "checkmate-unpartitioned")]
    for solution in both:
        check(solution, graph)
        assert solution.status == "optimal"
    assert both[0].cost == both[1].cost == cheapest(graph, budget)


@pytest.mark.slow
def test_partitioned_and_unpartitioned_agree_on_the_tightest_three_layers():
    solution = solve(chain(3), 3, "checkmate-unpartitioned", time_limit=None)
    assert (solution.status, solution.cost) == ("optimal", 10)


# Against brute force -----------------------------------------------------------------------------------------


@st.composite
def problems(draw, **options):
    graph = draw(graphs(**options))
    plain = simulate(graph, Schedule.default(graph)).peak_bytes
    floor = memory_floor(graph).bytes
    return graph, draw(st.integers(max(0, floor - 1), max(plain, floor)))


@settings(max_examples=120, deadline=None)
@given(problems() | problems(overwrite=True))
def test_checkmate_equals_brute_force_over_its_class(problem):
    graph, budget = problem
    solution = solve(graph, budget, "checkmate", time_limit=None)
    check(solution, graph)
    best = cheapest_stage_once(graph, budget)
    if math.isinf(best):
        assert solution.status == "infeasible"
        if solution.scope == "any":
            assert math.isinf(cheapest(graph, budget))
        return
    assert (solution.status, solution.cost) == ("optimal", best)
    if solution.scope == "any":
        assert cheapest(graph, budget) == best


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from(FAST))
def test_every_planner_stays_within_budget_and_no_bound_is_beaten(problem, method):
    graph, budget = problem
    solution = solve(graph, budget, method, time_limit=None)
    check(solution, graph)
    anything, paper = cheapest(graph, budget), cheapest_stage_once(graph, budget)
    reachable = anything if solution.scope == "any" else paper
    if solution.lower_bound is not None:
        assert solution.lower_bound <= reachable
    if solution.cost is not None:
        assert solution.cost >= anything
    if solution.status == "optimal":
        assert solution.cost == reachable
    if solution.status == "infeasible":
        assert math.isinf(reachable)
    if solution.status == "infeasible" or (solution.schedule is None and method in HEURISTICS and not solution.message):
        assert solution.budget_bound <= smallest_budget(graph) <= solution.smallest_budget
        assert method in HEURISTICS or solution.status in ("infeasible", "unknown")
        assert method not in HEURISTICS or solution.status == "unknown"


@settings(max_examples=40, deadline=None)
@given(problems(max_ops=4))
def test_unpartitioned_is_never_worse_than_partitioned(problem):
    graph, budget = problem
    free = solve(graph, budget, "checkmate-unpartitioned", time_limit=None)
    check(free, graph)
    paper = cheapest_stage_once(graph, budget)
    assert (free.cost if free.cost is not None else math.inf) <= paper


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_min_memory_is_between_its_bound_and_the_plain_peak(graph):
    solution = solve(graph, None, "min-memory")
    check(solution, graph)
    assert memory_floor(graph).bytes <= smallest_budget(graph) <= solution.peak_bytes <= solution.base_peak_bytes


@settings(max_examples=40, deadline=None)
@given(graphs(choices=True) | graphs(overwrite=True), st.sampled_from(FAST))
def test_graphs_with_choices_never_break_a_planner_or_the_bound(graph, method):
    plain = simulate(graph, Schedule.default(graph)).peak_bytes
    floor = memory_floor(graph).bytes
    for budget in {floor, (floor + plain) // 2, plain}:
        solution = solve(graph, budget, method, time_limit=None)
        check(solution, graph)
        if solution.lower_bound is not None and solution.scope == "any":
            assert solution.lower_bound <= cheapest(graph, budget)


# Heuristics --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [chain(8), chain(15), random_chain(12, seed=3), NETWORKS["mobilenet"](1)])
@pytest.mark.parametrize("kind", ["sqrt", "greedy"])
def test_generalisations_are_the_original_on_linear_networks(graph, kind):
    original = list(METHODS[f"chen-{kind}"].candidates(graph))
    for name in ("ap", "linearized"):
        assert list(METHODS[f"{name}-{kind}"].candidates(graph)) == original


def test_chen_on_a_chain_is_the_schedule_of_the_paper():
    # nine forward ops (the loss is the ninth): checkpoints f3, f6 and the loss; the last segment is still there
    [schedule] = METHODS["chen-sqrt"].candidates(chain(8))
    assert schedule.steps() == [
        *["f1", "f2", "f3", "f4", "f5", "f6", "f7", "f8", "loss", "b8", "b7", "b6"],
        *["f4", "f5", "b5", "b4", "b3"],
        *["f1", "f2", "b2", "b1"],
    ]


@pytest.mark.parametrize("method", ["griewank", "chen-sqrt", "chen-greedy"])
@pytest.mark.parametrize("graph", [residual(3), unet_like(2), NETWORKS["resnet50"](1)])
def test_linear_methods_say_that_they_do_not_apply(method, graph):
    solution = solve(graph, None, method)
    assert (solution.status, solution.schedule) == ("unknown", None)
    assert f"{method} does not apply: the forward pass is not linear: op " in solution.why()


def advances(states: int, snapshots: int, known: dict[tuple[int, int], int]) -> int:
    """The recurrence behind REVOLVE: store state m, visit what is above it, then what is below."""
    if (states, snapshots) not in known:
        if states == 0 or snapshots == 0:
            known[states, snapshots] = states * (states + 1) // 2
        else:
            known[states, snapshots] = min(
                m + advances(states - m, snapshots - 1, known) + advances(m - 1, snapshots, known)
                for m in range(1, states + 1)
            )
    return known[states, snapshots]


def test_revolve_needs_the_fewest_advances():
    known: dict[tuple[int, int], int] = {}
    for states in range(30):
        for snapshots in range(states + 1):
            assert fewest_advances(states, snapshots) == advances(states, snapshots, known)


@pytest.mark.parametrize("layers", [1, 5, 8, 20])
def test_griewank_on_chains_costs_what_the_formula_says(layers):
    graph = chain(layers)
    for snapshots, schedule in zip(range(layers, -1, -1), METHODS["griewank"].candidates(graph), strict=True):
        judged = simulate(graph, schedule)
        assert judged.cost == fewest_advances(layers, snapshots) + 1 + layers
        assert judged.peak_bytes <= max(3, snapshots + 3)
        assert max(map(len, stored_states(layers, snapshots).values())) <= snapshots + 1


def test_griewank_is_optimal_on_the_papers_chain():
    assert solve(chain(8), 4, "griewank").cost == 26


def test_checkpoint_last_carries_one_value():
    [schedule] = METHODS["checkpoint-last"].candidates(chain(4))
    judged = simulate(chain(4), schedule)
    assert judged.peak_bytes == 3
    assert judged.cost == 5 + (4 + 1) + (3 + 1) + (2 + 1) + (1 + 1)


def test_articulation_points_are_where_the_network_is_one_wide():
    graph = residual(2, depth=2)
    names = [graph.ops[i].id for i in articulation_points(graph)]
    assert names == ["stem", "r1.add", "r2.add", "loss"]


def test_checkpoint_all_is_optimal_when_it_fits():
    graph = random_training(6, seed=2)
    plain = simulate(graph, Schedule.default(graph))
    solution = solve(graph, plain.peak_bytes, "checkpoint-all")
    assert (solution.status, solution.scope, solution.cost, solution.overhead) == ("optimal", "any", plain.cost, 0)
    assert solve(graph, plain.peak_bytes - 1, "checkpoint-all").status == "unknown"


@pytest.mark.parametrize("method", HEURISTICS)
def test_without_a_budget_every_heuristic_gives_a_schedule(method):
    solution = solve(chain(6), None, method)
    assert solution.schedule is not None
    assert solution.budget_bytes is None


# Rounding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_rounding_is_within_budget_and_repeatable(seed):
    graph = random_training(8, seed=seed)
    floor, plain = memory_floor(graph).bytes, simulate(graph, Schedule.default(graph)).peak_bytes
    for budget in ((floor + plain) // 2, (3 * floor + plain) // 4):
        one, two = (solve(graph, budget, "rounding", seed=7, time_limit=None) for _ in range(2))
        check(one, graph)
        assert one.schedule == two.schedule
        assert one.lower_bound == two.lower_bound


# Networks ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg16", "vgg19"])
@pytest.mark.parametrize("share", [0.95, 0.85])
def test_vgg_is_solved_to_proven_optimality(name, share):
    graph = NETWORKS[name](1)
    plain = simulate(graph, Schedule.default(graph)).peak_bytes
    budget = int(graph.resident_bytes + share * (plain - graph.resident_bytes))
    best = solve(graph, budget, "checkmate", time_limit=300)
    check(best, graph)
    assert best.status == "optimal"
    relaxed = solve(graph, budget, "lp")
    assert relaxed.lower_bound <= best.cost
    for method in ("rounding", "chen-sqrt", "chen-greedy", "griewank", "ap-greedy", "linearized-greedy"):
        other = solve(graph, budget, method)
        check(other, graph)
        assert other.cost is None or other.cost >= best.cost


# Answers -----------------------------------------------------------------------------------------------------


def test_infeasible_says_what_would_work():
    solution = solve(chain(8), 2, "checkmate")
    assert (solution.status, solution.scope) == ("infeasible", "any")
    assert solution.why() == "op 'b8' needs 3 B while it runs; needs at least 3 B; 3 B works"
    assert (solution.budget_bound, solution.smallest_budget) == (3, 3)


def test_a_time_limit_returns_the_best_so_far():
    graph = NETWORKS["mobilenet"](1)
    solution = solve(graph, "0.6", "checkmate", time_limit=3)
    check(solution, graph)
    assert solution.status == "feasible"
    assert solution.seconds < 8
    assert solve(graph, 0.6, "checkmate-unpartitioned", time_limit=1).status == "unknown"


def test_gap_stops_early():
    graph = chain(8)
    solution = solve(graph, 4, "checkmate", gap=0.5)
    assert solution.gap <= 0.5
    check(solution, graph)


def test_progress_is_heard():
    heard = []
    solve(chain(8), 4, "checkmate", progress=heard.append)
    assert heard[-1].incumbent == 26
    assert max(p.bound for p in heard if p.bound is not None) <= 26


def test_a_trivial_bound_is_exact():
    # one op dwarfs the rest; the difference between the schedules is far below any tolerance
    b = GraphBuilder()
    b.op("f1", outputs={"a": 1}, time=1)
    b.op("huge", inputs=["a"], outputs={"h": 1}, time=10**12)
    b.op("b1", inputs=["a", "h"], outputs={"g": 1}, time=1, phase="backward")
    graph = b.build()
    assert solve(graph, None, "checkpoint-last").status == "feasible"
    assert solve(graph, None, "checkpoint-all").status == "optimal"


@pytest.mark.parametrize("method", [m for m in FAST if m not in ("lp", "optimal")])
def test_planners_that_do_not_choose_leave_optional_ops_out(method):
    b = GraphBuilder()
    b.op("f1", outputs={"a": 1}, time=1)
    b.op("extra", inputs=["a"], outputs={"o": 1}, time=100, optional=True)
    b.op("loss", inputs=["a"], outputs={"l": 1}, time=1)
    b.op("b", inputs=["l", "a"], outputs={"g": 1}, time=1, phase="backward")
    solution = solve(b.build(), None, method)
    assert "extra" not in solution.schedule.steps()
    assert solution.cost == {"checkpoint-last": 4, "recompute-forward": 5}.get(method, 3)


def test_the_unpartitioned_program_may_reorder_first_runs():
    b = GraphBuilder()
    b.op("first", outputs={"r": 10}, time=1)
    b.op("second", outputs={"w": 0}, time=1, workspace=10)
    graph = b.build(["r"])
    assert solve(graph, 10, "checkmate").status == "infeasible"
    assert solve(graph, 10, "checkmate-unpartitioned").schedule.steps() == ["second", "first"]


def test_every_infeasible_answer_says_what_would_work():
    for method in ("optimal", "checkmate", "lp", "rounding", "min-memory"):
        solution = solve(chain(8), 2, method)
        assert (solution.status, solution.budget_bound, solution.smallest_budget) == ("infeasible", 3, 3)
    assert "works" not in solve(residual(3), None, "griewank").why()


def test_large_graphs_get_a_schedule_in_time():
    graph = chain(2500)
    for method in ("checkmate", "linearized-greedy", "griewank"):
        solution = solve(graph, 0.5, method, time_limit=3)
        assert solution.seconds < 12
        assert method == "griewank" or solution.schedule is not None


def test_several_outputs_are_not_merged():
    # norm makes a large y and a small s; only s is needed late. Merged, both would be carried.
    b = GraphBuilder()
    b.op("norm", outputs={"y": 10, "s": 1}, time=5)
    b.op("big", inputs=["y"], outputs={"z": 1}, time=1)
    b.op("huge", inputs=["z"], outputs={"w": 10}, time=1)
    b.op("end", inputs=["w", "s"], outputs={"e": 1}, time=1)
    solution = solve(b.build(), 12, "checkmate")
    assert (solution.status, solution.cost, solution.peak_bytes) == ("optimal", 8, 12)


def test_bad_arguments():
    graph = chain(2)
    with pytest.raises(MethodError, match="there is no method 'magic'; choose one of optimal"):
        solve(graph, 4, "magic")
    with pytest.raises(MethodError, match="there is no solver 'abacus'"):
        solve(graph, 4, "checkmate", solver="abacus")
    for key, value in (("gap", -1), ("gap", 1), ("time_limit", -1), ("time_limit", math.nan), ("seed", -1)):
        with pytest.raises(SettingError):
            solve(graph, 4, **{key: value})
