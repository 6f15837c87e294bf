"""A captured part of the user's program: planned for each shape and each amount of resident memory it meets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from recoup.errors import BudgetError, CaptureError, PlanError, ScheduleError
from recoup.graph import Graph
from recoup.judge import memory_curve, simulate
from recoup.planfile import Plan
from recoup.schedule import Schedule
from recoup.solving import solve
from recoup.torch.difference import difference
from recoup.torch.internals import compile_joint, graph_break
from recoup.torch.joint import ARRIVAL, Joint, read_joint
from recoup.torch.profile import profile
from recoup.torch.progress import Reporter
from recoup.torch.rewrite import rewrite
from recoup.torch.session import Session
from recoup.torch.split import split
from recoup.torch.step import step_graph
from recoup.torch.store import device_name, library_versions
from recoup.units import format_bytes, resolve_budget

GRAIN = 1024  # resident memory is rounded up to this part of the budget, so that a few bytes more are no new plan


@dataclass(frozen=True)
class Variant:
    """A part compiled for one shape and at most ``resident`` bytes around it. Nothing is planned without a gradient."""

    function: Callable[..., Any]
    resident: int
    plan: Plan | None


class Planned(Exception):  # noqa: N818 - it ends a run that only wanted the plan
    """The plan that was asked for."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


class Part:
    """Called like the graph that Dynamo captured; plans it when a call is not covered by what was planned before."""

    def __init__(self, session: Session, module: fx.GraphModule) -> None:
        self.session = session
        self.module = module
        self.ends_early = graph_break(module)
        self.share_later = 0.5 if self.ends_early else 0.0
        """Share of the memory above the resident part that is left to parts that run after this one."""
        self.variants: dict[Any, list[Variant]] = {}
        self.current: Variant | None = None
        self._dynamic = _dynamic_positions(module)
        if self.ends_early:
            session.note(f"the program is planned in parts; one ends here: {self.ends_early}")

    def __call__(self, *args: Any) -> Any:
        self.session.calls += 1
        variant = self._variant(args)
        self.current = variant
        if variant.plan is not None:
            self.session.ran.append(self)
        return variant.function(*args)

    @property
    def kept_bytes(self) -> int:
        """Bytes this part holds between its forward and its backward, by the plan in use."""
        if self.current is None or self.current.plan is None:
            return 0
        plan = self.current.plan
        position = plan.schedule.steps().index(ARRIVAL)
        workspace = plan.graph.ops[plan.graph.op_index[ARRIVAL]].workspace
        return int(memory_curve(plan.graph, plan.schedule)[position]) - workspace - plan.graph.resident_bytes

    def plain_need(self) -> int:
        """Bytes above the resident part at the peak of this part's plain step."""
        if self.current is None or self.current.plan is None:
            return 0
        graph = self.current.plan.graph
        return simulate(graph, Schedule.default(graph)).peak_bytes - graph.resident_bytes

    def _variant(self, args: Sequence[Any]) -> Variant:
        device = self.session.device(args)
        resident = self.session.resident(device, args) + self.session.settings.reserve_bytes
        key = (self.share_later, *(_shape(args[index]) for index in self._dynamic))
        fitting = [variant for variant in self.variants.get(key, ()) if resident <= variant.resident]
        if fitting:
            return min(fitting, key=lambda variant: variant.resident)
        variant = self._compile(args, device, resident)
        self.variants.setdefault(key, []).append(variant)
        return variant

    def _compile(self, args: Sequence[Any], device: torch.device, resident: int) -> Variant:
        made: list[Plan] = []

        def partition(module: fx.GraphModule, outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
            rewrite(module)
            joint = read_joint(module, outputs)
            plan = self._plan(joint, device, resident)
            made.append(plan)
            return split(joint, [str(step) for step in plan.schedule.steps()])

        function = compile_joint(self.module, args, partition, plain=lambda whole: whole)
        plan = made[0] if made else None
        if plan is not None and self.session.only_plan:
            if self.ends_early:
                raise CaptureError(f"a plan holds one graph, and this program is captured in parts: {self.ends_early}")
            raise Planned(plan)
        return Variant(function, plan.graph.resident_bytes if plan else 2**62, plan)

    def _plan(self, joint: Joint, device: torch.device, resident: int) -> Plan:
        """The plan for this joint graph: the one the user gave, one from the store, or a new one."""
        session, settings = self.session, self.session.settings
        store = session.store(device)
        with Reporter(settings.verbose) as reporter:
            costs = profile((op.node for op in joint.ops), device, store, store.rates, reporter.measured)
            exact = step_graph(joint, costs, device, resident)
            plain = simulate(exact, Schedule.default(exact)).peak_bytes
            budget = resolve_budget(session.budget(device), plain)
            assert budget is not None
            between = int(self.share_later * max(0, budget - resident))
            grain = -(-budget // GRAIN)
            graph = step_graph(
                joint, costs, device, -(-resident // grain) * grain, between=between, name=type(self.module).__name__
            )
            if settings.plan is not None:
                return _checked(settings.plan, graph, device)
            key = f"{graph.fingerprint} {budget} {settings.planner} {settings.gap} {settings.time_limit}"
            plan = _stored(store.plan(key), graph, budget)
            if plan is None:
                solution = solve(
                    graph,
                    budget,
                    settings.planner,
                    time_limit=settings.time_limit,
                    gap=settings.gap,
                    progress=reporter.searched,
                )
                if solution.schedule is None:
                    raise BudgetError(
                        f"a budget of {format_bytes(budget)} is not enough for this step ({format_bytes(resident)} are "
                        f"resident, {format_bytes(plain)} is its plain peak): {solution.why()}"
                    )
                plan = Plan.of(solution)
                store.remember_plan(key, plan.schedule.steps())
            reporter.planned(plan, plain)
        return Plan(**{**plan.__dict__, "profiled_on": where(device)})


def where(device: torch.device) -> str:
    """Where a plan was measured: hardware, then versions."""
    return f"{device_name(device)}; {library_versions()}"


def _stored(steps: list[Any] | None, graph: Graph, budget: int) -> Plan | None:
    """A schedule from the store, if the judge still passes it."""
    if steps is None:
        return None
    try:
        schedule = Schedule.of(graph, steps)
        judged = simulate(graph, schedule)
    except ScheduleError:
        return None
    if judged.peak_bytes > budget:
        return None
    return Plan(graph, schedule, judged.cost, judged.peak_bytes, budget, method="stored")


def _checked(plan: Plan, graph: Graph, device: torch.device) -> Plan:
    """The user's plan, on the graph that was captured; an error that names the difference if it does not belong."""
    found = difference(plan, graph, where(device))
    if found:
        raise PlanError(f"the plan does not fit this step: {found}")
    schedule = Schedule.of(graph, plan.schedule.steps())
    judged = simulate(graph, schedule)
    if plan.budget_bytes is not None and judged.peak_bytes > plan.budget_bytes:
        raise BudgetError(
            f"the plan was made with {format_bytes(plan.graph.resident_bytes)} resident; now there are "
            f"{format_bytes(graph.resident_bytes)}, and its peak would be {format_bytes(judged.peak_bytes)}, over its "
            f"budget of {format_bytes(plan.budget_bytes)}: make a plan with reserve="
        )
    return Plan(graph, schedule, judged.cost, judged.peak_bytes, plan.budget_bytes, plan.method, plan.status, plan.scope)


def _dynamic_positions(module: fx.GraphModule) -> list[int]:
    """Which inputs of the captured graph can change shape from call to call."""
    positions = []
    for index, node in enumerate(module.graph.find_nodes(op="placeholder")):
        example = node.meta.get("example_value")
        shape = example.shape if isinstance(example, torch.Tensor) else (example,)
        if any(isinstance(size, torch.SymInt) for size in shape):
            positions.append(index)
    return positions


def _shape(arg: Any) -> Any:
    return tuple(arg.shape) if isinstance(arg, torch.Tensor) else arg
