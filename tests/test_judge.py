import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup import GraphBuilder, Implementation, Schedule, ScheduleError, simulate
from recoup.generators import chain, random_training
from tests import naive
from tests.strategies import graphs, schedules


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_same_as_the_rules_step_by_step(data):
    graph = data.draw(graphs(choices=True))
    steps = data.draw(schedules(graph))
    try:
        expected = naive.judge(graph, steps)
    except naive.InvalidError:
        with pytest.raises(ScheduleError):
            simulate(graph, steps)
        return
    judged = simulate(graph, steps)
    assert (judged.cost, judged.memory.tolist()) == expected
    assert judged.peak_bytes == max(expected[1], default=graph.resident_bytes)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_sequence_of_runs_is_judged_like_the_rules(data):
    graph = data.draw(graphs(max_ops=4, choices=True))
    kernels = [(op.id, impl.name) for op in graph.ops for impl in op.implementations]
    steps = data.draw(st.lists(st.sampled_from(kernels), max_size=8))
    try:
        expected = naive.judge(graph, steps)
    except naive.InvalidError:
        with pytest.raises(ScheduleError):
            simulate(graph, steps)
    else:
        judged = simulate(graph, steps)
        assert (judged.cost, judged.memory.tolist()) == expected


def test_chain_by_hand():
    judged = simulate(chain(2), ["f1", "f2", "loss", "b2", "f1", "b1"])
    assert judged.cost == 6
    assert judged.memory.tolist() == [1, 2, 2, 3, 2, 3]
    assert judged.peak_bytes == 3
    assert judged.live(3) == ("a2", "g3", "g2")
    assert judged.live(4) == ("a1", "g2")


def test_workspace_counts_only_while_the_op_runs():
    b = GraphBuilder(resident_bytes=100)
    [y] = b.op("a", outputs={"y": 2}, time=1, workspace=7)
    b.op("b", inputs=[y], outputs={"z": 3}, time=1)
    assert simulate(b.build(), ["a", "b"]).memory.tolist() == [109, 105]


def test_required_output_stays_and_a_double_is_dropped():
    b = GraphBuilder()
    b.op("a", outputs={"y": 2, "s": 10}, time=1)
    b.op("b", inputs=["s"], outputs={"z": 1}, time=1)
    b.op("c", inputs=["s", "z"], outputs={"w": 1}, time=1)
    graph = b.build(outputs=["y"])
    assert simulate(graph, ["a", "b", "c"]).memory.tolist() == [12, 13, 14]
    # rerunning a for s: y is there twice while a runs (2 + 2), then once
    assert simulate(graph, ["a", "b", "a", "c"]).memory.tolist() == [12, 13, 15, 14]


def test_in_place_adds_nothing_and_destroys():
    b = GraphBuilder()
    b.value("y", 4)
    b.value("z", 4)
    b.op("a", outputs=["y"], time=1)
    plain = Implementation(("y",), ("z",), 1, name="plain")
    over = Implementation(("y",), ("z",), 1, inplace=("y", "z"), name="over")
    b.op("relu", implementations=[plain, over])
    b.op("c", inputs=["z"], outputs={"w": 1}, time=1)
    graph = b.build()
    assert simulate(graph, ["a", "relu", "c"]).memory.tolist() == [4, 8, 5]
    assert simulate(graph, ["a", ("relu", "over"), "c"]).memory.tolist() == [4, 4, 5]
    with pytest.raises(ScheduleError, match=r"step 2 runs op 'relu', which reads 'y', but 'y' has been overwritten"):
        simulate(graph, ["a", ("relu", "over"), "relu", "c"])


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (["f1", "loss"], "op 'b1' never runs"),
        (["loss", "f1", "b1"], "step 0 runs op 'loss', which reads 'a1', but 'a1' has not been made: run op 'f1'"),
        (["f1", "nope"], "the graph has no op 'nope'"),
        (["f1", ("loss", "fast")], "op 'loss' has no implementation 'fast'"),
        (["f1", 3], "a step is an op id"),
    ],
)
def test_invalid_schedules_say_why(steps, message):
    with pytest.raises(ScheduleError, match=message.replace("[", r"\[")):
        simulate(chain(1), steps)


def test_once_means_once():
    b = GraphBuilder()
    b.op("a", outputs={"y": 1}, time=1, once=True)
    with pytest.raises(ScheduleError, match="op 'a' may run only once but runs 2 times"):
        simulate(b.build(), ["a", "a"])


def test_float_costs_do_not_depend_on_the_order():
    b = GraphBuilder()
    for i, t in enumerate((0.1, 0.2, 0.3, 1e16, 1.0, -0.0)):
        b.op(f"o{i}", outputs={f"v{i}": 1}, time=abs(t))
    graph = b.build()
    ids = [op.id for op in graph.ops]
    assert simulate(graph, ids).cost == simulate(graph, ids[::-1]).cost


def test_empty_graph():
    judged = simulate(GraphBuilder(resident_bytes=5).build(), [])
    assert (judged.peak_bytes, judged.cost, len(judged.memory)) == (5, 0, 0)


def test_live_needs_a_step_that_exists():
    with pytest.raises(ScheduleError, match="there is no step 3: the schedule has 3"):
        simulate(chain(1), ["f1", "loss", "b1"]).live(3)


def test_schedule_of_another_graph_is_refused():
    with pytest.raises(ScheduleError, match="another graph"):
        simulate(chain(2), Schedule.default(chain(1)))


@pytest.mark.parametrize(("layers", "limit"), [(750, 0.005), (5000, 0.05)])
def test_fast_enough_to_sit_inside_a_search(layers, limit):
    graph = random_training(layers)
    schedule = Schedule.default(graph)
    simulate(graph, schedule)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        simulate(graph, schedule)
        seconds.append(time.perf_counter() - began)
    assert np.min(seconds) < limit
