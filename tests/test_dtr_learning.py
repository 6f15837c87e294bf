"""What learning stands on, without tensors: steps that repeat, orders from a schedule, planning in the background."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recoup
from recoup.generators import chain, named
from recoup.graph import Graph, Implementation
from recoup.online.background import Planning
from recoup.online.notes import Note, Notes
from recoup.online.orders import Order, memory_with_copies, orders, outliving, worthwhile
from recoup.online.repeats import Repeats
from recoup.schedule import Schedule
from tests.strategies import graphs, trainings

LAYERS = 60


def training_step(layers=LAYERS):
    """Operators and bytes held before each: layers forward, the same backward, a loop over parameters."""
    forward = [(kind, 100 + 10 * layer) for layer in range(layers) for kind in (1, 2, 3)]
    backward = [(kind, 100 + 10 * layer) for layer in reversed(range(layers)) for kind in (4, 5)]
    update = [(kind, 100) for _ in range(layers) for kind in (6, 7, 8)]
    return [*forward, (9, 100 + 10 * layers), *backward, *update]


def found_after(program):
    """Where the step was found, and what was."""
    repeats = Repeats()
    for count, (number, held) in enumerate(program, 1):
        repeats.add(number, held)
        found = repeats.find()
        if found is not None:
            return count, found
    return None


def test_a_step_is_found_and_not_the_loops_inside_it():
    step = training_step()
    count, (numbers, upcoming) = found_after(step * 6)
    assert 2 * len(step) <= count <= 4 * len(step)
    assert sorted(numbers) == sorted(number for number, _ in step)
    least = numbers.index(1, 1) if numbers[0] != 1 else 0
    assert numbers[least:] + numbers[:least] == [number for number, _ in step]
    assert numbers[upcoming] == step[count % len(step)][0]


def test_a_step_begins_where_least_is_held():
    step = [(kind, held + 5) for kind, held in training_step()]
    step[7] = (77, 1)
    _, (numbers, _) = found_after(step * 6)
    assert numbers[0] == 77


def test_steps_that_grow_do_not_repeat():
    program = [(number, held + 200 * turn) for turn in range(6) for number, held in training_step()]
    assert found_after(program) is None


@settings(max_examples=30)
@given(st.integers(20, 90), st.integers(0, 700), st.integers(0, 2**32 - 1))
def test_any_step_is_found_after_any_beginning(length, before, seed):
    chance = np.random.default_rng(seed)
    beginning = [(100 + int(chance.integers(50)), int(chance.integers(900))) for _ in range(before)]
    step = [(int(chance.integers(10)), int(chance.integers(1, 900))) for _ in range(length)]
    step[0] = (99, 0)
    step[length // 2] = (98, 1000)
    program = beginning + step * (4 + 2000 // length)
    count, (numbers, upcoming) = found_after(program)
    assert numbers == [number for number, _ in step]
    assert upcoming == (count - before) % length


def test_no_step_in_a_program_that_never_repeats():
    assert found_after([(number, number % 7) for number in range(5000)]) is None


@settings(deadline=None, max_examples=25)
@given(graphs(max_ops=8, overwrite=True) | trainings(), st.floats(0.5, 1))
def test_orders_run_the_schedule(graph, share):
    """Following the orders runs what the schedule runs, and holds no more than it."""
    graph = renamed(graph)
    plain = recoup.simulate(graph, Schedule.default(graph)).peak_bytes
    solution = recoup.solve(graph, int(share * plain))
    schedule = solution.schedule or Schedule.default(graph)  # where that is too little
    before = orders(schedule, len(graph.ops), {})
    ran, live, peak = [], set(), 0
    sizes = {value.id: value.bytes for value in graph.values}

    def run(op):
        nonlocal peak
        assert all(value in live for value in op.inputs if value in graph.producer)
        ran.append(op.id)
        over = op.implementations[0].inplace
        made = [value for value in op.outputs if value not in live and not (over and value == over[1])]
        held = graph.resident_bytes + sum(sizes[value] for value in live)
        doubles = [value for value in op.outputs if value in live]
        peak = max(peak, held + sum(sizes[value] for value in (*made, *doubles)) + op.workspace)
        live.update(op.outputs)
        if over:
            live.discard(over[0])

    for position, op in enumerate(graph.ops):
        for order in before[position]:
            if order.evict:
                live.discard(str(order.values[0]))
            else:
                run(next(other for other in graph.ops if other.outputs == tuple(map(str, order.values))))
        run(op)
    assert set(graph.outputs) <= live
    steps = schedule.steps()
    last = max(steps.index(op.id) for op in graph.ops)
    assert ran == steps[: last + 1]
    assert peak <= recoup.simulate(graph, schedule).peak_bytes <= max(memory_with_copies(schedule, copies=True))


@settings(deadline=None, max_examples=25)
@given(trainings(), st.floats(0.4, 0.9))
def test_what_outlives_the_program_is_all_that_repeating_needs(graph, share):
    """A program lets go of a value after its last reader; what the schedule repeats finds its inputs all the same."""
    graph = renamed(graph, apart=2)
    plain = recoup.simulate(graph, Schedule.default(graph)).peak_bytes
    schedule = recoup.solve(graph, int(share * plain)).schedule or Schedule.default(graph)
    ends = {}
    for op in graph.ops:
        ends.update((int(value), int(op.id) + 1) for value in (*op.inputs, *op.outputs))
    ends = {value: end for value, end in ends.items() if str(value) not in graph.outputs}
    holds = outliving(schedule, ends)
    before = orders(schedule, 2 * len(graph.ops), ends, holds)
    live = set()
    for position in range(2 * len(graph.ops)):
        live -= {str(value) for value, end in ends.items() if end == position and value not in holds}
        for order in before[position]:
            made = tuple(map(str, order.values))
            if order.evict:
                live.discard(made[0])
            else:
                again = next(other for other in graph.ops if other.outputs == made)
                assert all(value in live for value in again.inputs if value in graph.producer)
                live.update(made)
        assert not any(holds[value] <= position and str(value) in live for value in holds)
        if str(position) in graph.op_index:
            live.update(graph.ops[graph.op_index[str(position)]].outputs)


@settings(deadline=None, max_examples=25)
@given(graphs(max_ops=8) | trainings(), st.floats(0.5, 1), st.floats(1, 1.5))
def test_evictions_that_buy_nothing_are_left_out(graph, share, more):
    """What stays fits, and nothing is brought back that the schedule would not have run again."""
    graph = renamed(graph)
    plain = recoup.simulate(graph, Schedule.default(graph)).peak_bytes
    schedule = recoup.solve(graph, int(share * plain)).schedule or Schedule.default(graph)
    everything = orders(schedule, len(graph.ops), {})
    room = int(more * recoup.simulate(graph, schedule).peak_bytes)
    before = worthwhile(everything, schedule, {}, room, copies=False)
    sizes = {value.id: value.bytes for value in graph.values}
    live, ran = set(), 0
    for position, op in enumerate(graph.ops):
        for order in before[position]:
            if order.evict:
                live.discard(str(order.values[0]))
            elif not live.issuperset(map(str, order.values)):
                live.update(map(str, order.values))
                ran += 1
        assert all(value in live for value in op.inputs if value in graph.producer)
        live.update(op.outputs)
        ran += 1
        assert graph.resident_bytes + sum(sizes[value] for value in live) + op.workspace <= room
    assert ran <= len(schedule)
    if room >= graph.resident_bytes + sum(sizes.values()) + max(op.workspace for op in graph.ops):
        assert not any(order.evict for orders_ in before for order in orders_)


def test_what_came_back_for_others_stays_until_it_is_evicted():
    notes = recoup.GraphBuilder()
    for value, size in enumerate((2, 4, 8, 1, 16)):
        notes.value(str(value), size)
    for position, inputs in enumerate(((), ("0",), (), ("1", "2"), ("3",))):
        notes.op(str(position), inputs=inputs, outputs=(str(position),), time=1)
    graph = notes.build(["4"])
    schedule = Schedule.of(graph, ["0", "1", "2", "0", "1", "3", "4"])
    assert recoup.simulate(graph, schedule).peak_bytes == 17
    ends = {0: 2, 1: 4, 2: 4, 3: 5}  # by itself the program lets go of 0 long before it comes back
    before = worthwhile(orders(schedule, 5, ends), schedule, ends, 18, copies=False)
    assert Order((0,), evict=True) in before[3]  # there is room beside 3, and none beside 4
    before = worthwhile(orders(schedule, 5, ends), schedule, ends, 19, copies=False)
    assert Order((0,), evict=True) not in before[3]


def renamed(graph: Graph, apart: int = 1) -> Graph:
    """Ops and values called by their positions, as in a step that was written down; all operators between two of these
    have nothing to do with any value."""
    names = {value.id: str(number) for number, value in enumerate(graph.values)}
    notes = recoup.GraphBuilder(resident_bytes=graph.resident_bytes)
    for value in graph.values:
        notes.value(names[value.id], value.bytes)
    for position, op in enumerate(graph.ops):
        first = op.implementations[0]
        over = tuple(names[value] for value in first.inplace) if first.inplace else None
        inputs, outputs = (tuple(names[value] for value in side) for side in (first.inputs, first.outputs))
        implementation = Implementation(inputs, outputs, first.time, first.workspace, over)
        notes.op(str(apart * position), implementations=[implementation], once=op.once)
    return notes.build(names[value] for value in graph.outputs)


def test_the_program_lets_go_by_itself():
    notes = noted_chain()
    graph = notes.graph(held=[])
    schedule = Schedule.of(graph, ["0", "1", "2", "3"])
    told = [[order.values for order in line] for line in orders(schedule, 4, {})]
    assert told == [[], [], [(0,)], [(1,)]]
    assert orders(schedule, 4, {0: 2, 1: 4})[2:] == [[], orders(schedule, 4, {})[3]]


def test_a_schedule_in_another_order_is_refused():
    graph = noted_chain().graph(held=[])
    two = recoup.GraphBuilder()
    for name in ("0", "1"):
        two.op(name, outputs={name: 1}, time=1)
    with pytest.raises(ValueError, match="operator 0 would run after operator 1"):
        orders(Schedule.of(two.build(), ["1", "0"]), 2, {})
    assert len(graph.ops) == 4


def noted_chain():
    """Four operators in a row, the last of which leaves nothing."""
    notes = Notes(resident_bytes=10)
    for position in range(3):
        reads = [position - 1] if position else []
        notes.operators.append(Note("f", reads, [notes.value(4)], None, False, 1.0, 1))
    notes.operators.append(Note("read", [2]))
    return notes


def test_notes_become_a_graph():
    notes = noted_chain()
    notes.operators.insert(0, Note("counts"))  # nothing that a plan could change
    notes.operators[3].over = (1, 2)
    graph = notes.graph(held=[])
    assert [op.id for op in graph.ops] == ["1", "2", "3", "4"]
    assert graph.ops[2].implementations[0].inplace == ("1", "2")
    assert [op.once for op in graph.ops] == [False, False, False, True]
    assert recoup.simulate(graph, Schedule.default(graph)).peak_bytes == 10 + 8 + 1
    held = notes.graph(held=[1])
    assert held.outputs == ("1",)
    assert held.ops[2].implementations[0].inplace is None  # what is still held was not written over


def test_planning_in_the_background():
    graph = chain(8)
    planning = Planning(graph, 4, seconds=20, gap=0)
    while not planning.done:
        time.sleep(0.05)
    schedule = planning.schedule()
    assert recoup.simulate(graph, schedule).cost == 26
    planning.stop()


def test_planning_for_too_little_has_no_answer():
    planning = Planning(chain(8), 1, seconds=5, gap=0)
    while not planning.done:
        time.sleep(0.05)
    assert planning.schedule() is None
    planning.stop()


def test_planning_can_be_stopped():
    planning = Planning(named("resnet50:8"), 2**30, seconds=60, gap=0)
    assert not planning.done
    planning.stop()
    assert planning.done
