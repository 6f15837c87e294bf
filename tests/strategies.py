"""Random small graphs for hypothesis: everything the format allows, all sizes and times small integers."""

from __future__ import annotations

from hypothesis import strategies as st

from recoup import Graph, GraphBuilder, Implementation


@st.composite
def graphs(draw: st.DrawFn, max_ops: int = 8, choices: bool = False, overwrite: bool = False) -> Graph:
    """A valid graph; with ``choices`` some ops are optional or have several implementations, in-place ones included.

    With ``overwrite`` first implementations may be in place.
    """
    b = GraphBuilder("random", resident_bytes=draw(st.integers(0, 4)))
    known = [b.input("x", bytes=draw(st.integers(0, 3)))]  # made by ops that always run, by their first implementation
    extra: list[str] = []  # made only sometimes
    made: list[str] = []
    size: dict[str, int] = {}
    ops = draw(st.integers(1, max_ops))
    forward = draw(st.integers(0, ops))
    for i in range(ops):
        inputs = draw(st.lists(st.sampled_from(known), max_size=3, unique=True))
        outputs = [f"v{i}.{k}" for k in range(draw(st.sampled_from([1, 1, 1, 2, 0])))]
        for value in outputs:
            size[value] = draw(st.integers(0, 5))
            b.value(value, size[value])
        optional = choices and draw(st.integers(0, 7)) == 0
        first = _implementation(draw, inputs, outputs, "first", size if overwrite else None)
        if first.inplace:
            known.remove(first.inplace[0])
        implementations = [first]
        if choices and draw(st.booleans()):
            others = draw(st.lists(st.sampled_from(known + extra), max_size=3, unique=True))
            implementations.append(_implementation(draw, others, outputs, "second", size))
        if not choices and not overwrite:
            implementations = [Implementation(first.inputs, first.outputs, first.time, first.workspace)]
        b.op(
            f"op{i}",
            implementations=implementations,
            phase="forward" if i < forward else "backward",
            optional=optional,
            once=draw(st.integers(0, 9)) == 0,
        )
        (extra if optional else known).extend(outputs)
        made += [] if optional else outputs
    overwritten = {impl.inplace[0] for op in b._ops for impl in op.implementations if impl.inplace}
    keepable = [v for v in made if v not in overwritten]
    outputs = draw(st.lists(st.sampled_from(keepable), max_size=2, unique=True)) if keepable else []
    return b.build(outputs)


def _implementation(
    draw: st.DrawFn, inputs: list[str], outputs: list[str], name: str, size: dict[str, int] | None = None
) -> Implementation:
    inplace = None
    if size is not None:
        pairs = [(i, o) for i in inputs for o in outputs if i in size and size[i] == size[o]]
        if pairs and draw(st.booleans()):
            inplace = draw(st.sampled_from(pairs))
    workspace = draw(st.sampled_from([0, 0, 0, 1, 3]))
    return Implementation(tuple(inputs), tuple(outputs), draw(st.integers(0, 5)), workspace, inplace, name)


@st.composite
def schedules(draw: st.DrawFn, graph: Graph) -> list[tuple[str, str]]:
    """A valid schedule with repeats: steps are drawn, and what cannot run is preceded by what it needs."""
    steps: list[tuple[str, str]] = []
    live: set[str] = set()
    ran: set[str] = set()
    maker = graph.producer

    def run(index: int, choice: int) -> bool:
        op = graph.ops[index]
        if op.once and op.id in ran:
            return False
        impl = op.implementations[choice]
        for value in impl.inputs:
            if value in maker and value not in live and not run(maker[value], 0):
                return False
        if any(value in maker and value not in live for value in impl.inputs):
            return False  # making one input overwrote another
        steps.append((op.id, impl.name))
        ran.add(op.id)
        live.update(impl.outputs)
        if impl.inplace:
            live.discard(impl.inplace[0])
        return True

    for index, op in enumerate(graph.ops):
        for _ in range(draw(st.integers(0, 2))):
            again = draw(st.integers(0, index))
            run(again, draw(st.integers(0, len(graph.ops[again].implementations) - 1)))
        if not op.optional and op.id not in ran:
            run(index, 0)
    return steps


@st.composite
def trainings(draw: st.DrawFn) -> Graph:
    """Forward and backward of a few layers, each of two operators, the second of which alone the backward reads."""
    b = GraphBuilder("training", resident_bytes=draw(st.integers(0, 4)))
    sizes = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 8)), min_size=2, max_size=4))
    last: list[str] = []
    for layer, (small, large) in enumerate(sizes):
        inner = b.op(f"inner{layer}", inputs=last, outputs={f"u{layer}": small}, time=draw(st.integers(1, 3)))
        last = [*b.op(f"outer{layer}", inputs=inner, outputs={f"v{layer}": large}, time=1)]
    for layer in reversed(range(len(sizes))):
        inputs = dict.fromkeys([*last, f"v{layer}"])
        last = [*b.op(f"backward{layer}", inputs=inputs, outputs={f"g{layer}": sizes[layer][0]}, time=2)]
    return b.build(last)
