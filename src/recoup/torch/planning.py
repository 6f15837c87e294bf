"""From a captured step to its plan: the user's own, one found before, or a new one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from recoup.errors import BudgetError
from recoup.graph import Graph
from recoup.judge import simulate
from recoup.planfile import Plan
from recoup.schedule import Schedule
from recoup.solution import Solution
from recoup.solving import SMALLEST_BUDGET_SECONDS, solve
from recoup.torch.algorithms import Untried, choose_again, has_choices, workspaces
from recoup.torch.costs import Cost, signature, tensors_of
from recoup.torch.estimate import ABSENT, estimate
from recoup.torch.joint import ARRIVAL, Joint, JointOp
from recoup.torch.known import checked, known_by, stored
from recoup.torch.memory import allocated_size
from recoup.torch.profile import profile
from recoup.torch.progress import Reporter
from recoup.torch.rng import CPU_STATE_BYTES
from recoup.torch.settings import Settings
from recoup.torch.step import ARGUMENTS, arguments, step_graph
from recoup.torch.store import Store, conditions, library_versions
from recoup.units import Budget, format_bytes, resolve_budget

FALLEN = 0.97  # of what a plan took when it was made: where smaller workspaces make it less, there may be a better one
GRAIN = 1024  # resident memory is rounded up to this part of the budget, so that a few bytes more are no new plan


@dataclass(frozen=True)
class StepPlan:
    """A plan, the budget it was made for, and the resident bytes up to which it holds."""

    plan: Plan
    budget: int
    resident: int
    need: int
    """Bytes above the resident ones at the peak of the plain step, whatever other parts of the program need."""
    correction: int = 0
    """By how much the prediction was corrected after the step had been tried out."""

    @property
    def repeats(self) -> bool:
        """Whether anything is recomputed."""
        return len(self.plan.schedule) > len(self.plan.graph.ops)

    def within(self, budget: int) -> StepPlan:
        """The same under another budget."""
        plan = self.plan if self.plan.budget_bytes is None else replace(self.plan, budget_bytes=budget)
        return replace(self, plan=plan, budget=budget)


@dataclass(frozen=True)
class StepPlanner:
    """Plans one captured part with ``now`` bytes resident around it, leaving later parts their share."""

    settings: Settings
    store: Store
    budget: Budget
    mode: str
    now: int
    share_later: float
    later_gradients: int
    known: Sequence[StepPlan]
    """Plans for other shapes of the same program."""
    may_be_plain: bool
    """Whether PyTorch's own partitioner may do: not where a plan was given, or is all that is wanted."""
    floor: int
    """The largest budget that this program had so far: a fraction of another part's or shape's peak may be less."""
    hint: int
    """The correction that another compilation of this program needed."""
    reporter: Reporter
    start: tuple[str, ...] = ()
    """A schedule to begin from, where it is one of the step and fits."""

    @property
    def device(self) -> torch.device:
        """The device whose memory is planned."""
        return self.store.device

    @property
    def resident(self) -> int:
        """Bytes to plan for around the step: what is there, and what the user reserved."""
        return self.now + self.settings.reserve_bytes

    def plan(self, joint: Joint, costs: Mapping[str, Cost], correction: int = 0) -> StepPlan:
        """The plan; its prediction was found to be ``correction`` bytes too low, and they are added to it."""
        plain = self.plain(joint, costs)
        budget, resident = plain.budget, self.resident
        if self.settings.plan is not None:
            given = checked(self.settings.plan, plain.plan.graph, self.where())
            if given.peak_bytes > budget:
                raise BudgetError(
                    f"the plan's peak is {format_bytes(given.peak_bytes)}, over the budget of {format_bytes(budget)}: "
                    "leave budget= out, which takes the plan's own, or make a plan for it"
                )
            return self._done(given, plain, resident)
        exact = self._graph(joint, costs, budget, max(0, resident + correction))
        plan = stored(plain.plan.schedule.steps(), exact, budget)
        if plan is not None:
            return self._done(replace(plan, method="plain"), plain, resident)
        for assumed in (rounded(resident, budget), resident):
            found = self._with_states(joint, costs, budget, max(0, assumed + correction))
            if isinstance(found, Plan):
                return self._done(found, plain, assumed)
            why = found.why()
        predicted = "; these are predictions, which a compiled step may exceed" if self.mode == "inductor" else ""
        raise BudgetError(
            f"a budget of {format_bytes(budget)} is not enough for this step ({format_bytes(resident)} are resident, "
            f"{format_bytes(plain.need + resident)} is its plain peak): {why}"
            f"{self._room_for_loss(exact, budget)}{predicted}"
        )

    def _room_for_loss(self, graph: Graph, budget: int) -> str:
        """What to do where the budget is refused for what is allowed for outside of the step."""
        arrival = graph.ops[graph.op_index[ARRIVAL]]
        sizes = {value.id: value.bytes for value in graph.values}
        held = graph.resident_bytes + sum(sizes[value] for value in {*arrival.inputs, *arrival.outputs})
        if self.share_later or not held <= budget < held + arrival.workspace:
            return ""
        return (
            f"; {format_bytes(arrival.workspace)} of that are room for a loss outside, which is not planned: with the "
            "loss inside, in a function under @recoup.optimize, they are not needed"
        )

    def _done(self, plan: Plan, plain: StepPlan, assumed: int) -> StepPlan:
        """The plan holds for as much more around the step as it leaves of the budget."""
        self.reporter.planned(plan, plain.need + self.resident)
        room = plain.budget - plan.peak_bytes
        return StepPlan(replace(plan, profiled_on=self.where()), plain.budget, assumed + room, plain.need)

    def _with_states(self, joint: Joint, costs: Mapping[str, Cost], budget: int, around: int) -> Plan | Solution:
        """A plan with room for the generator states that it replays from; if there is none, one without replays.

        If there is neither, the smallest budget to name has room for the states of all that may be replayed.
        """
        states = 0
        while True:
            found = self._solve(self._graph(joint, costs, budget, around + states), budget)
            if isinstance(found, Solution) or (needed := _random_states(joint, found)) <= states:
                break
            states = needed
        if isinstance(found, Plan):
            return found
        every = CPU_STATE_BYTES * sum(op.random and _on_cpu(op) for op in joint.ops)
        working = [] if found.smallest_budget is None else [found.smallest_budget - states + every]
        if states:
            found = self._solve(self._graph(joint, costs, budget, around, replay=False), budget)
            if isinstance(found, Plan):
                return found
            working += [] if found.smallest_budget is None else [found.smallest_budget]
        return replace(found, smallest_budget=min(working, default=None))

    def reuse(self, joint: Joint) -> StepPlan | None:
        """A schedule made for a larger shape, if it is one of the same ops and fits here; the plain one if that fits.

        So a program whose shapes vary is measured and planned for the largest, not for each. Not where cuDNN would try
        its algorithms for each.
        """
        if has_choices((op.node for op in joint.ops), self.device):
            return None
        for other in reversed(self.known):
            old = {op.id: op for op in other.plan.graph.ops}
            if old.keys() != {op.id for op in joint.ops} | {ARRIVAL}:
                continue
            if any(
                old[op.id].workspace and (old[op.id].meta or {}).get(ARGUMENTS) != arguments(op) for op in joint.ops
            ):
                continue
            sizes = {value.id: value.bytes for value in other.plan.graph.values}
            if any(allocated_size(one.bytes, self.device) > sizes.get(one.id, -1) for one in joint.storages):
                continue
            rates = self.store.rates()
            costs = {
                op.id: replace(
                    estimate(op.node, rates),
                    workspace=old[op.id].workspace,
                    outputs=tuple(joint.storages[i].bytes or sizes[joint.storages[i].id] for i in op.writes),
                )
                for op in joint.ops
            }
            plain = self.plain(joint, costs)
            graph = self._graph(
                joint, costs, plain.budget, self.resident + CPU_STATE_BYTES * sum(op.random for op in joint.ops)
            )
            for steps in (plain.plan.schedule.steps(), other.plan.schedule.steps()):
                plan = stored(steps, graph, plain.budget)
                if plan is not None:
                    return self._done(plan, plain, self.resident)
        return None

    def plain(self, joint: Joint, costs: Mapping[str, Cost]) -> StepPlan:
        """The step as it is, with nothing recomputed, whether it fits or not.

        A fraction is of the largest plain peak among the program's parts and shapes.
        """
        alone = step_graph(joint, costs, self.device, self.resident)
        peak = simulate(alone, Schedule.default(alone)).peak_bytes
        budget = resolve_budget(self.budget, peak)
        assert budget is not None
        budget = max(budget, self.floor)
        graph = self._graph(joint, costs, budget, self.resident)
        schedule = Schedule.default(graph)
        judged = simulate(graph, schedule)
        plan = Plan(graph, schedule, judged.cost, judged.peak_bytes, method="plain", profiled_on=self.where())
        return StepPlan(plan, budget, self.resident, peak - self.resident)

    def measured_plain(self, step: StepPlan, peak_bytes: int) -> StepPlanner:
        """With a budget that is at least its fraction of what the plain step took, which may be more than predicted."""
        peak = step.need + self.resident + peak_bytes - step.plan.peak_bytes
        return replace(self, floor=max(self.floor, resolve_budget(self.budget, peak) or 0))

    def _graph(self, joint: Joint, costs: Mapping[str, Cost], budget: int, around: int, replay: bool = True) -> Graph:
        between = int(self.share_later * max(0, budget - self.resident))
        return step_graph(
            joint, costs, self.device, around, between=between, later_gradients=self.later_gradients, replay=replay
        )

    def costs(self, nodes: Sequence[fx.Node], channels_last: bool = False) -> dict[str, Cost]:
        """What each signature among the nodes costs: measured here, or estimated for a device that is not."""
        if self.settings.estimate:
            return {signature(node): estimate(node, ABSENT) for node in nodes}
        return profile(nodes, self.store, self.reporter.measured, channels_last)

    def make_room(
        self, joint: Joint, costs: Mapping[str, Cost], correction: int = 0, channels_last: bool = False
    ) -> tuple[Untried, StepPlanner] | None:
        """Where there is no plan: have cuDNN choose algorithms in less memory, if there would be one with them.

        What to raise for that, and who plans then: for the same budget, though a fraction of what is needed then may be
        less, and beginning from the schedule that left room for them.
        """
        nodes = [op.node for op in joint.ops]
        taken = workspaces(nodes, self.device, channels_last)
        if self.settings.estimate or not taken:
            return None
        least = {
            op.id: replace(costs[op.id], workspace=costs[op.id].workspace - taken.get(op.node, 0)) for op in joint.ops
        }
        given, budget = self.settings.plan, self.plain(joint, costs).budget
        graph = self._graph(joint, least, budget, max(0, self.resident + correction))
        if given is None:
            found = solve(graph, None, "min-memory", time_limit=SMALLEST_BUDGET_SECONDS).schedule
            assert found is not None
            limit = budget
        else:
            found, limit = Schedule.of(graph, given.schedule.steps()), min(budget, given.budget_bytes or budget)
        rooms: dict[str, int] = {}
        for index, memory in zip(found.ops.tolist(), simulate(graph, found).memory.tolist(), strict=True):
            name = graph.ops[index].id
            rooms[name] = min(limit - memory, rooms.get(name, limit))
        if min(rooms.values()) < 0:
            return None
        less = {op.node: rooms[op.id] for op in joint.ops if rooms[op.id] < taken.get(op.node, 0)}
        untried = choose_again(less, nodes, self.store, self.reporter.measured, channels_last)
        if untried is None:
            return None
        return untried, replace(self, floor=max(self.floor, budget), start=tuple(map(str, found.steps())))

    def where(self) -> str:
        """Where a plan was measured: hardware, then what the numbers depend on."""
        if self.settings.estimate:
            return f"a GPU that was not there; estimated, {library_versions()}"
        return f"{conditions(self.device)}, {self.mode}"

    def _solve(self, graph: Graph, limit: int) -> Plan | Solution:
        """A plan from the store or from the planner, or what the planner says where there is none."""
        settings = self.settings
        key = f"{known_by(graph)} {limit} {settings.planner} {settings.gap} {settings.time_limit}"
        kept = self.store.recall(key)
        if kept and isinstance(kept[0], int):
            plan = stored(kept[1:], graph, limit)
            if plan is not None and plan.peak_bytes - graph.resident_bytes >= FALLEN * kept[0]:
                return plan
        start = stored(list(self.start) or None, graph, limit)
        solution = solve(
            graph,
            max(0, limit),
            settings.planner,
            time_limit=settings.time_limit,
            gap=settings.gap,
            start=None if start is None else start.schedule,
            progress=self.reporter.searched,
        )
        in_vain = solution.schedule is None and (solution.smallest_budget or limit + 1) <= limit
        if in_vain and solution.method != "optimal":
            message = f"{solution.method} finds nothing that fits; planner='auto' does"
            return replace(solution, message=message, smallest_budget=None)
        if in_vain:
            solution = replace(solve(graph, None, "min-memory", time_limit=SMALLEST_BUDGET_SECONDS), budget_bytes=limit)
        if solution.schedule is None or (solution.peak_bytes or 0) > limit:
            return solution
        plan = Plan.of(solution)
        self.store.keep(key, [plan.peak_bytes - graph.resident_bytes, *solution.schedule.steps()])
        return plan


def rounded(resident: int, budget: int) -> int:
    """Up to the next :data:`GRAIN` of the budget."""
    grain = max(1, -(-budget // GRAIN))
    return -(-resident // grain) * grain


def _random_states(joint: Joint, plan: Plan) -> int:
    """Bytes of the generator states that replaying the plan's random ops takes; CUDA's live outside the device."""
    runs = Counter(plan.schedule.steps())
    return sum(CPU_STATE_BYTES for op in joint.ops if op.random and runs[op.id] > 1 and _on_cpu(op))


def _on_cpu(op: JointOp) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors_of(op.node.meta.get("val")))
