"""Eager mode: the ops of the captured graph, one by one, as plain PyTorch would run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx

from recoup.errors import BudgetError
from recoup.torch.algorithms import with_algorithms
from recoup.torch.costs import signature
from recoup.torch.internals.graphs import compile_joint
from recoup.torch.joint import read_joint
from recoup.torch.planning import StepPlan, StepPlanner
from recoup.torch.rewrite import are_leaves, copy_gradients, order_products, split_convolutions, use_best_batch_norm
from recoup.torch.rng import EAGER
from recoup.torch.split import split


def compile_step(
    module: fx.GraphModule, args: Sequence[Any], planner: StepPlanner
) -> tuple[Callable[..., Any], StepPlan | None]:
    """The step as a function, and the plan it follows; None if nothing in it needs a gradient."""
    made: list[StepPlan] = []
    leaves = are_leaves(args)  # AOTAutograd may hold on to its partitioner, so the inputs themselves may not be in it

    def partition(traced: fx.GraphModule, outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        nonlocal planner
        split_convolutions(traced)
        order_products(traced)
        use_best_batch_norm(traced)
        copy_gradients(traced, outputs, leaves)
        joint = read_joint(traced, outputs)
        step = planner.reuse(joint)
        if step is None:
            measured = planner.costs([op.node for op in joint.ops])
            costs = {op.id: measured[signature(op.node)] for op in joint.ops}
            try:
                step = planner.plan(joint, costs)
            except BudgetError:
                again = planner.make_room(joint, costs)
                if again is None:
                    raise
                untried, planner = again
                raise untried from None
        made.append(step)
        return split(joint, [str(step) for step in made[0].plan.schedule.steps()], EAGER)

    function = with_algorithms(partial(compile_joint, module, args, partition, planner.settings.estimate))
    return function, made[0] if made else None
