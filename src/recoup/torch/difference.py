"""Why a plan does not belong to a step: the first thing that differs, in words."""

from __future__ import annotations

from recoup.graph import Graph
from recoup.planfile import Plan


def difference(plan: Plan, graph: Graph, here: str) -> str | None:
    """None if the plan's schedule can run on ``graph``, measured ``here``; times and resident bytes may differ."""
    if plan.profiled_on is not None:
        made, now = plan.profiled_on.partition("; ")[2], here.partition("; ")[2]
        if made != now:
            return f"it was made with {made}; this is {now}"
    theirs, ours = plan.graph, graph
    if len(theirs.ops) != len(ours.ops):
        return f"it has {len(theirs.ops)} ops, the step has {len(ours.ops)}"
    for old, new in zip(theirs.ops, ours.ops, strict=True):
        if (old.id, old.name) != (new.id, new.name):
            return f"where it has {old.id} ({old.name}), the step has {new.id} ({new.name})"
        if (old.meta or {}).get("shapes") != (new.meta or {}).get("shapes"):
            return (
                f"{old.id} makes shapes {(old.meta or {}).get('shapes')}, the step's {(new.meta or {}).get('shapes')}"
            )
        if (old.inputs, old.outputs) != (new.inputs, new.outputs):
            return f"{old.id} reads {list(old.inputs)}, the step's reads {list(new.inputs)}"
    sizes = {value.id: value.bytes for value in ours.values}
    for value in theirs.values:
        if sizes.get(value.id) != value.bytes:
            return f"{value.id} has {value.bytes} bytes there and {sizes.get(value.id)} in the step"
    return None
