import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup import BudgetError, GraphBuilder, GraphError, Schedule, SettingError, max_batch, simulate
from recoup.batch import largest_batch
from recoup.generators import NETWORKS, chain, random_training
from tests.exact import cheapest_stage_once
from tests.strategies import graphs


def test_equation_11_for_a_baseline():
    graph = NETWORKS["vgg19"](1)
    plain = simulate(graph, Schedule.default(graph)).peak_bytes
    fixed = graph.resident_bytes - graph.resident_scaling_bytes
    result = max_batch(graph, "16GB", "checkpoint-all")
    assert result.batch == (16 * 10**9 - fixed) // (plain - fixed) == 220


def test_equation_11_takes_the_best_setting_within_equation_10():
    graph = NETWORKS["mobilenet"](1)
    forward = sum(op.time for op in graph.ops if op.phase == "forward")
    total = sum(op.time for op in graph.ops)
    result = max_batch(graph, "16GB", "chen-greedy")
    assert result.cost_limit == total + forward
    assert result.cost <= result.cost_limit
    assert result.batch > max_batch(graph, "16GB", "checkpoint-all").batch
    free = max_batch(graph, "16GB", "griewank", max_extra=None)
    assert free.cost_limit is None
    assert free.batch >= max_batch(graph, "16GB", "griewank").batch


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(1, 60))
def test_one_more_does_not_fit(graph, budget):
    schedule = Schedule.default(graph)
    if not any(v.bytes for v in graph.values if v.id in graph.producer):
        return
    batch = largest_batch(graph, schedule, budget)
    if not any(op.outputs for op in graph.ops) or batch > 10**9:
        return
    for size, fits in ((batch, True), (batch + 1, False)):
        if size:
            scaled = graph.scaled(size)
            assert (simulate(scaled, Schedule(scaled, schedule.kernels)).peak_bytes <= budget) == fits


@pytest.mark.parametrize("seed", range(3))
def test_checkmate_finds_the_largest_batch_of_its_class(seed):
    graph = random_training(3, seed=seed)
    budget = 200
    result = max_batch(graph, budget, "checkmate", time_limit=None)
    assert result.batch == result.upper_bound
    for batch, fits in ((result.batch, True), (result.batch + 1, False)):
        assert (cheapest_stage_once(graph.scaled(batch), budget) <= result.cost_limit) == fits
    for method in ("optimal", "checkpoint-all", "ap-greedy", "linearized-greedy", "rounding", "min-memory"):
        other = max_batch(graph, budget, method, time_limit=None)
        assert method != "optimal" or other.batch >= result.batch
        assert other.batch <= result.batch or method == "optimal"
        assert other.cost is None or other.cost <= other.cost_limit


def test_fixed_values_do_not_grow():
    b = GraphBuilder(resident_bytes=10)
    b.value("table", 50, scales=False)
    b.op("a", outputs=["table"], time=1)
    b.op("b", inputs=["table"], outputs={"y": 5}, time=1)
    assert max_batch(b.build(), 100, "checkpoint-all").batch == (100 - 10 - 50) // 5


def test_nothing_fits_or_nothing_applies():
    graph = chain(4)
    assert max_batch(graph, 2, "checkmate").batch == 0
    result = max_batch(NETWORKS["unet"](1), "16GB", "griewank")
    assert (result.batch, result.schedule) == (0, None)
    assert "does not apply" in result.message


def test_bad_arguments():
    graph = chain(2)
    for budget in (0.5, "0.5", None, 0):
        with pytest.raises(BudgetError, match="budget in bytes"):
            max_batch(graph, budget)
    for extra in (-1, float("inf")):
        with pytest.raises(SettingError, match="max_extra"):
            max_batch(graph, 10, max_extra=extra)
    with pytest.raises(SettingError, match="seed"):
        max_batch(graph, 10, seed=-1)
    b = GraphBuilder()
    b.value("y", 5, scales=False)
    b.op("a", outputs=["y"], time=1)
    with pytest.raises(GraphError, match="nothing in this graph scales"):
        max_batch(b.build(), 10)


def test_the_smallest_peak_that_is_not_too_dear():
    """Repair for the floor costs more than an extra forward pass: what costs less counts."""
    graph = chain(20)
    budget = 3 * simulate(graph, Schedule.default(graph)).peak_bytes
    found = {
        method: max_batch(graph, budget, method).batch for method in ("min-memory", "linearized-sqrt", "ap-greedy")
    }
    assert found["min-memory"] >= max(found.values())
