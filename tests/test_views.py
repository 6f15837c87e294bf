import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup import GraphBuilder, Implementation, Schedule, simulate
from recoup.generators import chain, residual
from recoup.views import Compute, Deallocate, matrices, minimal_recomputation, schedule_of, statements
from tests.strategies import graphs, schedules


def test_plain_step_is_the_diagonal():
    graph = chain(2)
    view = matrices(Schedule.default(graph))
    assert np.array_equal(view.R, np.eye(5, dtype=bool))
    # f1 is carried until b1 reads it, f2 until b2, loss until b2, b2 until b1
    assert view.S.astype(int).tolist() == [
        [0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
    ]


def test_stages_end_with_a_first_run():
    graph = chain(2)
    view = matrices(Schedule.of(graph, ["f1", "f2", "loss", "b2", "f1", "b1"]))
    assert view.R.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [1, 0, 0, 0, 1],
    ]
    assert np.array_equal(minimal_recomputation(graph, view.S), view.R)


def test_a_repeat_within_a_stage_opens_a_row():
    graph = chain(2)
    view = matrices(Schedule.of(graph, ["f1", "f2", "loss", "b2", "f1", "f2", "f1", "b1"]))
    assert view.R.shape == (6, 5)
    assert view.R[4].astype(int).tolist() == [1, 1, 0, 0, 0]
    assert view.R[5].astype(int).tolist() == [1, 0, 0, 0, 1]


def test_minimal_r_restores_correctness():
    graph = residual(2)
    nothing = np.zeros((len(graph.ops), len(graph.ops)), dtype=bool)
    R = minimal_recomputation(graph, nothing)
    judged = simulate(graph, schedule_of(graph, R))
    assert R[-1].sum() == len(graph.ops)  # the last op depends on everything, and nothing was carried
    assert judged.cost == R.sum()
    everything = np.tri(len(graph.ops), k=-1, dtype=bool)
    assert np.array_equal(minimal_recomputation(graph, everything), np.eye(len(graph.ops), dtype=bool))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_schedule_to_matrices_and_back(data):
    graph = data.draw(graphs())
    steps = data.draw(schedules(graph))
    if not {op.id for op in graph.ops} <= {name for name, _ in steps}:
        return  # an op that runs once was drawn too early
    schedule = Schedule.of(graph, steps)
    judged = simulate(graph, schedule)
    view = matrices(schedule)
    assert schedule_of(graph, view.R) == schedule
    assert len(view.R) >= len(graph.ops)
    for t, row in enumerate(view.R):  # (1b)
        for j in np.flatnonzero(row):
            for value in graph.ops[j].inputs:
                if value in graph.producer:
                    i = graph.producer[value]
                    assert row[i] or view.S[t, i]
    assert not (view.S[1:] & ~view.S[:-1] & ~view.R[:-1]).any()  # (1c)
    assert judged.cost == simulate(graph, schedule_of(graph, view.R)).cost


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_minimal_r_never_costs_more_than_the_schedule_its_s_came_from(data):
    graph = data.draw(graphs())
    S = np.array(data.draw(st.lists(st.booleans(), min_size=len(graph.ops) ** 2, max_size=len(graph.ops) ** 2)))
    S = np.tril(S.reshape(len(graph.ops), -1), -1)
    S[:, graph.arrays.once] = np.tri(len(graph.ops), k=-1, dtype=bool)[:, graph.arrays.once]
    schedule = schedule_of(graph, minimal_recomputation(graph, S))
    judged = simulate(graph, schedule)
    again = minimal_recomputation(graph, matrices(schedule).S) if len(matrices(schedule).S) == len(graph.ops) else None
    if again is not None:
        assert simulate(graph, schedule_of(graph, again)).cost <= judged.cost


def test_statements_of_a_chain():
    program = statements(Schedule.of(chain(2), ["f1", "f2", "loss", "b2", "f1", "b1"]))
    assert [str(s) for s in program] == [
        "%0 = compute f1",
        "%1 = compute f2",
        "deallocate %0",
        "%2 = compute loss",
        "%3 = compute b2",
        "deallocate %1",
        "deallocate %2",
        "%4 = compute f1",
        "%5 = compute b1",
        "deallocate %3",
        "deallocate %4",
        "deallocate %5",
    ]


def test_statements_of_several_outputs_choices_and_required_outputs():
    b = GraphBuilder()
    for name in ("y", "s", "z", "w"):
        b.value(name, 1)
    b.op("norm", outputs=["y", "s"], time=1)
    plain = Implementation(("y",), ("z",), 1, name="plain")
    b.op("relu", implementations=[plain, Implementation(("y",), ("z",), 1, inplace=("y", "z"), name="over")])
    b.op("last", inputs=["z", "s"], outputs=["w"], time=1)
    schedule = Schedule.of(b.build(outputs=["w"]), ["norm", ("relu", "over"), "last"])
    assert [str(s) for s in statements(schedule)] == [
        "%0, %1 = compute norm",
        "%2 = compute relu by over over %0",
        "%3 = compute last",
        "deallocate %1",
        "deallocate %2",
    ]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_statements_hold_exactly_what_the_judge_counts(data):
    graph = data.draw(graphs(choices=True))
    steps = data.draw(schedules(graph))
    schedule = Schedule.of(graph, steps)
    try:
        judged = simulate(graph, schedule)
    except ValueError:
        return
    held: dict[int, int] = {}
    step = -1
    for statement in statements(schedule):
        if isinstance(statement, Deallocate):
            del held[statement.register]
            continue
        assert isinstance(statement, Compute)
        step += 1
        op = graph.ops[graph.op_index[statement.op]]
        impl = op.implementations[0]
        if statement.implementation:
            impl = next(i for i in op.implementations if i.name == statement.implementation)
        sizes = [graph.values[graph.value_index[v]].bytes for v in impl.outputs]
        if statement.over is not None:
            del held[statement.over]
        held |= dict(zip(statement.registers, sizes, strict=True))
        assert graph.resident_bytes + sum(held.values()) + impl.workspace == judged.memory[step]
    assert len(held) == len({v for v in graph.outputs if v in graph.producer})
