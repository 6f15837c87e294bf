"""What is made again goes beside the kernel that reads the same, with the same steps and no higher a peak."""

from collections import Counter

from hypothesis import event, given
from hypothesis import strategies as st

from recoup import Graph, GraphBuilder, Schedule, simulate
from recoup.planfile import Plan
from recoup.torch.fusion import LARGE
from recoup.torch.joint import ARRIVAL
from recoup.torch.together import bring_together

LAYER = ["up", "gelu", "down", ARRIVAL, "gelu", "down.weight", "down.input", "gelu.backward", "up.weight"]
TOGETHER = ["up", "gelu", "down", ARRIVAL, "down.input", "gelu", "gelu.backward", "down.weight", "up.weight"]
FUSED = {"gelu", "gelu.backward"}


def layers(resident: int = 0, at_the_end: int = 0) -> Graph:
    """Two linear layers around a GELU; the last op needs so many bytes more."""
    b = GraphBuilder("layers", resident_bytes=resident)
    x = b.input("x", bytes=0)
    [u] = b.op("up", inputs=[x], outputs={"u": LARGE}, time=9)
    [a] = b.op("gelu", inputs=[u], outputs={"a": LARGE}, time=1)
    [y] = b.op("down", inputs=[a], outputs={"y": 8}, time=9)
    [g] = b.op(ARRIVAL, inputs=[y], outputs={"g": LARGE}, time=0, phase="backward", once=True)
    b.op("down.weight", inputs=[a, g], outputs={"dw": 8}, time=9, phase="backward")
    [da] = b.op("down.input", inputs=[g], outputs={"da": LARGE}, time=9, phase="backward")
    [du] = b.op("gelu.backward", inputs=[u, da], outputs={"du": LARGE}, time=1, phase="backward")
    b.op("up.weight", inputs=[x, du], outputs={"dv": 8}, time=9, phase="backward", workspace=at_the_end)
    return b.build(outputs=[y, "dw", "dv"])


def planned(graph: Graph, steps: list[str]) -> Plan:
    judged = simulate(graph, Schedule.of(graph, steps))
    return Plan(graph, Schedule.of(graph, steps), judged.cost, judged.peak_bytes)


def test_a_value_made_again_waits_for_the_kernel_that_reads_the_same():
    plan = planned(layers(at_the_end=9 * LARGE), LAYER)
    moved = bring_together(plan, FUSED, set())
    assert moved.schedule.steps() == TOGETHER
    assert (moved.cost, moved.peak_bytes) == (plan.cost, plan.peak_bytes)


def test_not_where_the_peak_would_be_higher():
    """The gradient that waits is there beside what is made from it."""
    plan = planned(layers(), LAYER)
    assert simulate(plan.graph, Schedule.of(plan.graph, TOGETHER)).peak_bytes > plan.peak_bytes
    assert bring_together(plan, FUSED, set()).schedule.steps() == LAYER


def test_not_what_has_its_place():
    plan = planned(layers(at_the_end=9 * LARGE), LAYER)
    for fixed in ("gelu", "down.weight"):
        assert bring_together(plan, FUSED, {fixed}).schedule.steps() == LAYER
    assert bring_together(plan, FUSED - {"gelu"}, set()).schedule.steps() == LAYER
    assert bring_together(plan, {*FUSED, "down.weight", "down.input"}, set()).schedule.steps() == LAYER  # one kernel


@given(st.data())
def test_the_same_steps_and_no_higher_a_peak(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    graph = perceptron([LARGE * size for size in sizes], LARGE * data.draw(st.integers(0, 12)))
    steps = [op.id for op in graph.ops]
    for layer in data.draw(st.sets(st.integers(1, len(sizes) - 1))):
        steps.insert(steps.index(f"weight{layer}"), f"act{layer - 1}")
    names = st.sets(st.sampled_from([op.id for op in graph.ops if not op.once]), max_size=2)
    fused = {op.id for op in graph.ops if op.id.startswith("act")} | data.draw(names)
    fixed = {op.id for op in graph.ops if op.once} | data.draw(names)
    plan = planned(graph, steps)
    moved = bring_together(plan, fused, fixed)
    after = moved.schedule.steps()
    event("moved" if after != steps else "left")
    assert Counter(after) == Counter(steps)
    assert moved.peak_bytes == simulate(graph, Schedule.of(graph, after)).peak_bytes <= plan.peak_bytes
    assert after[: after.index(ARRIVAL)] == steps[: steps.index(ARRIVAL)]
    assert [step for step in after if step in fixed] == [step for step in steps if step in fixed]


def perceptron(sizes: list[int], workspace: int) -> Graph:
    """Layers of these sizes with an activation after each; the last op of the backward works in so many bytes."""
    b = GraphBuilder("perceptron")
    last = b.input("x", bytes=0)
    for layer, size in enumerate(sizes):
        [y] = b.op(f"linear{layer}", inputs=[last], outputs={f"y{layer}": size}, time=9)
        [last] = b.op(f"act{layer}", inputs=[y], outputs={f"a{layer}": size}, time=1)
    [g] = b.op(ARRIVAL, inputs=[last], outputs={"g": sizes[-1]}, time=0, phase="backward", once=True)
    for layer, size in reversed(list(enumerate(sizes))):
        [g] = b.op(f"act{layer}.backward", inputs=[f"y{layer}", g], outputs={f"g{layer}": size}, time=1)
        if layer:
            b.op(f"weight{layer}", inputs=[f"a{layer - 1}", g], outputs={f"w{layer}": 8}, time=9)
            [g] = b.op(f"input{layer}", inputs=[g], outputs={f"h{layer}": sizes[layer - 1]}, time=9)
    b.op("weight0", inputs=["x", g], outputs={"w0": 8}, time=9, workspace=workspace)
    return b.build(outputs=[last, *(f"w{layer}" for layer in range(len(sizes)))])
