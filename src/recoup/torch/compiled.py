"""Compiled mode: the step as Inductor sees it, with fused kernels as ops, tried out before it is used."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from recoup.errors import BudgetError, CaptureError
from recoup.graph import Graph
from recoup.judge import simulate
from recoup.planfile import Plan
from recoup.schedule import Schedule
from recoup.torch.algorithms import Untried, with_algorithms
from recoup.torch.corrections import Corrections
from recoup.torch.costs import Cost
from recoup.torch.fusion import folded_nodes, fused_costs, is_fused_kernel
from recoup.torch.internals.graphs import argument, communicates, written_input
from recoup.torch.internals.inductor import compile_inductor, lay_out_convolutions, prefers_channels_last
from recoup.torch.internals.tensors import count_writes
from recoup.torch.joint import ARRIVAL, Joint, from_tangents, read_joint
from recoup.torch.known import known_by, stored
from recoup.torch.memory import live_bytes, measure_rise
from recoup.torch.planning import StepPlan, StepPlanner, rounded
from recoup.torch.rewrite import (
    are_leaves,
    copy_gradients,
    copy_parts,
    forget_pooled,
    order_products,
    split_convolutions,
)
from recoup.torch.rng import INDUCTOR
from recoup.torch.split import split
from recoup.torch.step import LATER
from recoup.torch.together import bring_together
from recoup.units import format_bytes

ATTEMPTS = 3  # how often a step is compiled to make its measured peak meet the budget well
MOST_ATTEMPTS = 6  # how often, as long as it does not meet it at all, or leaves much of it
MOST_PLANS = 12  # how many plans are asked for; those that there are not, or were before, cost no compilation
CLOSE = 0.015  # of the budget: a measured peak this close below it is not worth another compilation
MUCH = 0.04  # of the budget: left by the best, it may be worth a few more
MARGIN = 0.003  # of the budget: added to what a measured peak was over the prediction
OUT_OF_MEMORY = 0.1  # of the prediction: taken for its error when the device had no room to measure it
DOUBTFUL = 2.0  # of the budget: up to this predicted plain peak, the plain step is tried before the budget is refused
PLAIN = 1.05  # of the budget: up to this predicted plain peak, the plain step itself may fit

PIECE = 2**25  # bytes

Steps = tuple[str, ...]  # of a schedule


class _IsKnown(Exception):  # noqa: N818 - no error
    """The plan was compiled before."""


@dataclass
class _Partitioner:
    """Plans the graph that Inductor hands over; ``plainly`` lets PyTorch's own partitioner go first where it may do,
    ``anyway`` whatever the prediction is."""

    planner: StepPlanner
    leaves: list[bool]
    """Which inputs are parameters. (Inductor holds on to its partitioner, so the inputs themselves may not be here.)"""
    known: dict[Steps, _Tried]
    """Those that were compiled before are not worth it again."""
    fits: bool
    """Whether one of them is within the budget."""
    correction: int | None
    """What to add to the prediction; None for what was learned when this step was last compiled."""
    plainly: bool
    anyway: bool = False
    step: StepPlan | None = None
    steps: Steps = ()
    is_plain: bool = False
    learned: bool = False
    key: str = ""
    channels_last: bool = False
    """How convolutions are laid out: as Inductor would those of the forward."""
    written: set[int | None] = field(default_factory=set)
    """The arguments that the step writes to; None stands for some that share memory."""

    def __call__(self, traced: fx.GraphModule, outputs: int) -> tuple[fx.GraphModule, fx.GraphModule] | None:
        if any(map(communicates, traced.graph.nodes)):
            raise CaptureError(
                "a compiled step is tried out, and this one communicates with other processes, which would have to try "
                "as often: use compile='eager'"
            )
        self.written = {argument(to) for node in traced.graph.nodes if (to := written_input(node)) is not None}
        in_backward = from_tangents(traced.graph)
        self.channels_last = prefers_channels_last(node for node in traced.graph.nodes if node not in in_backward)
        copy_gradients(traced, outputs, self.leaves)
        plain = read_joint(traced, outputs, folded_nodes(traced, self.channels_last))
        self.step = self.planner.plain(plain, self._costs(plain))
        graph, budget = self.step.plan.graph, self.step.budget
        about = replace(graph, resident_bytes=rounded(graph.resident_bytes, budget))
        self.key = f"correction {known_by(about)} {budget}"
        self.is_plain = self.anyway or (self.plainly and self.step.plan.peak_bytes <= PLAIN * self.step.budget)
        if self.is_plain:
            return None
        split_convolutions(traced, nearly=True, channels_last=self.channels_last)
        order_products(traced)
        copy_parts(traced)
        forget_pooled(traced, self.channels_last)
        joint = read_joint(traced, outputs, folded_nodes(traced, self.channels_last))
        planner = replace(self.planner, budget=self.step.budget)  # a fraction is of the step as PyTorch compiles it
        reused = planner.reuse(joint) if self.plainly else None
        given = self.correction
        if given is None:
            known = self.planner.store.recall(self.key)
            self.learned, self.correction = known is not None, sum(known or [self.planner.hint])
        try:
            self.step = _together(reused or self._plan(planner, joint), joint, planner)
        except Untried:
            self.correction = given
            self.known.clear()  # they were tried with other algorithms
            raise
        self.steps = tuple(str(step) for step in self.step.plan.schedule.steps())
        if self.steps in self.known:
            raise _IsKnown
        lay_out_convolutions(self.channels_last)
        return split(joint, self.steps, INDUCTOR)

    def _plan(self, planner: StepPlanner, joint: Joint) -> StepPlan:
        costs, correction = self._costs(joint), self.correction or 0
        try:
            return planner.plan(joint, costs, correction)
        except BudgetError:
            again = None if self.fits else planner.make_room(joint, costs, correction, self.channels_last)
            if again is None:
                raise
            untried, then = again
            self.planner = replace(self.planner, floor=then.floor, start=then.start)
            raise untried from None

    def _costs(self, joint: Joint) -> dict[str, Cost]:
        store = self.planner.store
        own = [op.node for op in joint.ops if not is_fused_kernel(op)]
        return fused_costs(joint, self.planner.costs(own, self.channels_last), store.rates())


def _together(step: StepPlan, joint: Joint, planner: StepPlanner) -> StepPlan:
    """With the plan's steps in an order that lets Inductor fuse more; the user's own plan is run as it is.

    The order is kept, too: with other workspaces another one might come out, and be compiled anew in the next process.
    """
    plan, store = step.plan, planner.store
    if planner.settings.plan is not None or not step.repeats:
        return step
    key = f"together {known_by(plan.graph)} {plan.schedule.steps()}"
    kept = stored(store.recall(key), plan.graph, step.budget)
    if kept is not None:
        return replace(step, plan=replace(plan, schedule=kept.schedule, peak_bytes=kept.peak_bytes))
    fused = {op.id for op in joint.ops if is_fused_kernel(op)}
    fixed = {op.id for op in joint.ops if op.once or op.random}
    ordered = bring_together(plan, fused, fixed)
    store.keep(key, list(ordered.schedule.steps()))
    return replace(step, plan=ordered)


@dataclass(frozen=True)
class _Tried:
    """A compiled step, its plan, and what it took: bytes at the peak, those of them that it added, and seconds."""

    function: Callable[..., Any]
    step: StepPlan
    peak_bytes: int
    rise_bytes: int
    seconds: float
    correction: int = 0

    @property
    def room(self) -> int:
        """Bytes of the budget that it leaves."""
        return self.step.budget - self.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether it is within the budget, and the device had room to see."""
        return self.room >= 0 and math.isfinite(self.seconds)


def compile_step(
    module: fx.GraphModule, args: Sequence[Any], planner: StepPlanner
) -> tuple[Callable[..., Any], StepPlan | None]:
    """Compile, try out, correct the prediction by what was measured, and plan again until it fits, and fits well.

    Where the plain step seems to fit, PyTorch's own partitioner goes first: if it does fit, there is nothing to plan.
    It is also asked before a budget is refused: the prediction may be too high.
    """
    best: _Tried | None = None
    correction: int | None = None
    refusal: BudgetError | None = None
    plainly, over, budget, planned, attempts = planner.may_be_plain, 0, 0, 0, 0
    corrections = Corrections()
    known: dict[Steps, _Tried] = {}
    for _ in range(MOST_PLANS):
        well_used = best is not None and best.room < MUCH * budget
        if attempts >= (ATTEMPTS if well_used else MOST_ATTEMPTS):
            break
        partitioner = _Partitioner(
            planner, are_leaves(args), known, best is not None, correction, plainly, refusal is not None and plainly
        )
        function = None
        try:
            function = with_algorithms(partial(compile_inductor, module, args, partitioner))
        except _IsKnown:
            pass
        except BudgetError as problem:
            if best is not None:
                break
            refusal = problem
            plain = partitioner.step
            if plain is None:
                raise
            if plainly and not partitioner.anyway and plain.plan.peak_bytes <= DOUBTFUL * plain.budget:
                continue
            refused, margin = partitioner.correction or 0, MARGIN * plain.budget
            if any(known) and refused - planned < margin:  # more than the plain step was tried: that is no prediction
                break
            if refused == planned or (refused < planned and correction is not None):  # this step's own error, measured
                raise
            correction, plainly = corrections.refused(planned, refused, margin), False
            continue
        finally:
            planner = partitioner.planner
        attempts += function is not None or best is not None  # as long as nothing fits, only compilations count
        planned = partitioner.correction or 0
        step = partitioner.step
        if function is None:
            assert step is not None
            tried = replace(known[partitioner.steps], step=step)
        elif step is None:
            return function, step
        else:
            tried = known[partitioner.steps] = _try_out(function, args, step, planner, partitioner.written)
        if not step.repeats and math.isfinite(tried.seconds):
            planner = planner.measured_plain(step, tried.peak_bytes)
            step = step.within(max(step.budget, planner.floor))
            tried = replace(tried, step=step)
        budget, room, fits = step.budget, tried.room, tried.fits
        if best is not None and function is not None and not math.isfinite(tried.seconds):
            # cuDNN may have taken to other algorithms when there was no room
            again = _try_out(best.function, args, best.step, planner, partitioner.written)
            best = replace(again, correction=best.correction) if again.fits else None
        if fits and (best is None or tried.seconds < best.seconds):
            best = replace(tried, correction=planned)
        well = partitioner.is_plain or partitioner.learned or room < CLOSE * budget or not step.repeats
        well = well or planner.settings.plan is not None
        if fits and well:
            break
        if room < 0 and math.isfinite(tried.seconds):
            over = room if over == 0 else max(over, room)
        if partitioner.anyway:
            correction = min(0, tried.peak_bytes - step.plan.peak_bytes)
        elif not partitioner.is_plain:
            margin = int(MARGIN * budget)
            correction = corrections.next(planned, tried.peak_bytes - step.plan.peak_bytes, fits, margin)
            correction = None if correction is None else max(correction, -planner.resident)  # all there is to take off
        if best is not None and correction in (None, planned):
            break
        plainly = False
    if best is None and refusal is not None and not budget:
        raise refusal
    if best is None and over == 0:
        raise BudgetError(
            f"the device ran out of memory in trying out steps that would fit into {format_bytes(budget)}: give a "
            "budget that is there, or budget='auto', which asks what is free"
        )
    if best is None:
        raise BudgetError(
            f"no compiled step was found within {format_bytes(budget)}: {format_bytes(budget - over, up=True)} would "
            "have been enough for the smallest that was tried"
        )
    if best.step.repeats:
        planner.store.keep(partitioner.key, [best.correction])
    return best.function, replace(
        best.step,
        plan=_as_measured(best.step.plan, best.peak_bytes),
        correction=best.correction,
        resident=best.step.budget - best.rise_bytes,
    )


def _as_measured(plan: Plan, peak_bytes: int) -> Plan:
    """The plan with its peak as it was when tried out: what the prediction was off by counts as resident."""
    around = max(0, plan.graph.resident_bytes + peak_bytes - plan.peak_bytes)
    graph = replace(plan.graph, resident_bytes=around)
    schedule = Schedule.of(graph, plan.schedule.steps())
    return replace(plan, graph=graph, schedule=schedule, peak_bytes=simulate(graph, schedule).peak_bytes)


def _try_out(
    function: Callable[..., Any], args: Sequence[Any], step: StepPlan, planner: StepPlanner, written: set[int | None]
) -> _Tried:
    """Run forward and backward on the caller's own inputs and undo it: no gradient, buffer or random state changes."""
    planner.reporter.say("trying out the compiled step")
    tried: tuple[int, int, float] | None = None
    with suppress(torch.OutOfMemoryError):
        room = _Room.of(step.plan.graph)
        tried = _measured(partial(_step, function, args, planner.device, room), args, planner.device, written)
    if tried is None:
        peak, seconds = int(step.plan.peak_bytes * (1 + OUT_OF_MEMORY)), math.inf
        rise = peak  # at most; such a step is never used
        gc.collect()  # the error held on to what was there, in cycles too: the next one is to be measured without
        torch.cuda.empty_cache()
    else:
        resident, rise, seconds = tried
        peak = resident + rise + planner.settings.reserve_bytes
    planner.reporter.tried(step.plan.peak_bytes, peak, seconds)
    return _Tried(function, step, peak, rise, seconds)


def _measured(
    step: Callable[[], None], args: Sequence[Any], device: torch.device, written: set[int | None]
) -> tuple[int, int, float]:
    """Bytes before a step on these arguments, the most that it adds to them, and seconds."""
    tensors = [
        arg
        for index, arg in enumerate(args)
        if isinstance(arg, torch.Tensor) and (not arg.requires_grad or not written.isdisjoint({index, None}))
    ]
    writes = [count_writes(tensor) for tensor in tensors]
    copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
            step()
            resident, rise = measure_rise(step, device)
            times = []
            for _ in range(3):
                start = time.perf_counter()
                step()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(time.perf_counter() - start)
    finally:  # also when memory ran out half-way
        with torch.no_grad():
            for tensor, before, copy in zip(tensors, writes, copies, strict=True):
                if count_writes(tensor) != before:
                    tensor.copy_(copy)
    return resident - live_bytes(copies, device), rise, statistics.median(times)


@dataclass(frozen=True)
class _Room:
    """Bytes that the rest of the program needs between forward and backward, and those that it leaves for good."""

    between: int
    left: int

    @staticmethod
    def of(graph: Graph) -> _Room:
        """As the plan allows for it."""
        arrival = graph.ops[graph.op_index[ARRIVAL]]
        return _Room(arrival.workspace, sum(value.bytes for value in graph.values if value.id == LATER))


def _step(function: Callable[..., Any], args: Sequence[Any], device: torch.device, room: _Room) -> None:
    """Forward and backward, and in between what happens outside."""
    with torch.enable_grad():
        fresh = [
            arg.detach().requires_grad_(arg.requires_grad) if isinstance(arg, torch.Tensor) else arg for arg in args
        ]
        results = function(*fresh)
        wanted = [result for result in results if isinstance(result, torch.Tensor) and result.requires_grad]
        given = [torch.ones_like(result) for result in wanted]
        left = _pieces(room.left, device)
        _pieces(room.between, device)
        torch.autograd.backward(wanted, given)
        del left


def _pieces(size: int, device: torch.device) -> list[torch.Tensor]:
    """So many bytes, not in one: what they stand for is not, either."""
    return [torch.empty(min(PIECE, size - begin), dtype=torch.uint8, device=device) for begin in range(0, size, PIECE)]
