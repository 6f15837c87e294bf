"""The judge's rules again, step by step and slowly, to check the fast judge against."""

from __future__ import annotations

from recoup import Graph


class InvalidError(Exception):
    pass


def judge(graph: Graph, steps: list[tuple[str, str]]) -> tuple[float, list[int]]:
    """Cost and memory per step; raises InvalidError."""
    impls = []
    for name, choice in steps:
        op = graph.ops[graph.op_index[name]]
        impls.append((op, next(i for i in op.implementations if i.name == choice)))
    for op in graph.ops:
        runs = sum(other is op for other, _ in impls)
        if (runs == 0 and not op.optional) or (op.once and runs > 1):
            raise InvalidError
    size = {v.id: v.bytes for v in graph.values}
    live: set[str] = set()
    memory = []
    for step, (_, impl) in enumerate(impls):
        if any(v in graph.producer and v not in live for v in impl.inputs):
            raise InvalidError
        # An instance about to be replaced was freed after its last use; required outputs stay, and are doubled.
        live -= {v for v in impl.outputs if v not in graph.outputs}
        made = [v for v in impl.outputs if impl.inplace is None or v != impl.inplace[1]]
        now = sum(size[v] for v in live) + sum(size[v] for v in made) + impl.workspace
        memory.append(graph.resident_bytes + now)
        live |= set(impl.outputs)
        if impl.inplace:
            live.discard(impl.inplace[0])
        live = {v for v in live if v in graph.outputs or _needed(v, impls[step + 1 :])}
    if any(v in graph.producer and v not in live for v in graph.outputs):
        raise InvalidError
    return sum(impl.time for _, impl in impls), memory


def _needed(value: str, rest: list) -> bool:
    """Whether the value is read before it is made again."""
    for _, impl in rest:
        if value in impl.inputs:
            return True
        if value in impl.outputs:
            return False
    return False
