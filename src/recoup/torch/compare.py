"""One training step run in several ways, side by side: what ``recoup run``, ``demo`` and ``profile`` measure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from functorch.compile import config as functorch_config  # type: ignore[import-untyped]
from torch import nn

from recoup.errors import CaptureError, RecoupError
from recoup.graph import Graph
from recoup.torch.arena import Arena, Outcome, Row, Say, Source, summary
from recoup.torch.hidden import Hidden
from recoup.torch.memory import automatic_budget
from recoup.torch.optimizing import optimize, plan, plans
from recoup.torch.settings import Mode, Settings
from recoup.torch.workload import SEED, Call, Workload, blocks, checkpoint_blocks
from recoup.units import Budget, resolve_budget


@dataclass(frozen=True)
class Comparison:
    """The rows, plain and recoup first, and what they were measured under."""

    name: str
    device: str
    mode: Mode
    budget_bytes: int
    rows: tuple[Row, ...]

    @property
    def plain(self) -> Row:
        """The step as it is."""
        return self.rows[0]

    @property
    def planned(self) -> Row:
        """The step by recoup's plan."""
        return self.rows[1]

    def to_data(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "model": self.name,
            "device": self.device,
            "compile": self.mode,
            "budget_bytes": self.budget_bytes,
            "rows": [row.to_data() for row in self.rows],
        }

    def verdict(self) -> str:
        """One line: recoup against plain."""
        plain, planned = self.plain, self.planned
        if plain.peak_bytes is None or planned.peak_bytes is None or not plain.seconds or planned.seconds is None:
            return planned.note or f"the plain step cannot be compared with: {plain.note}"
        difference = planned.gradient_difference
        same = "gradients that are not finite" if difference is None else f"gradients within {difference:.1e}"
        same = "the same gradients, bit for bit" if difference == 0 else same
        memory = _more_or_less(planned.peak_bytes / plain.peak_bytes)
        return f"{same}, {memory} memory, {_more_or_less(planned.seconds / plain.seconds)} time"


def captured(work: Workload, mode: Mode, verbose: bool | None = None, estimate: bool = False) -> Graph:
    """The graph of one plain step, measured on the device that ``work`` is on, or estimated for a GPU."""
    torch.manual_seed(SEED)
    # Room for the plain step, and only that is looked for: the graph is then the captured one to the byte.
    budget: Budget = 1.0 if mode == "eager" else 2**50
    try:
        found = plan(
            work.target(work.model),
            work.inputs,
            budget,
            compile=mode,
            planner="checkpoint-all",
            verbose=verbose,
            estimate=estimate,
        )
    except RecoupError:
        raise
    except Exception as problem:
        raise CaptureError(f"the step of {work.name} fails: {summary(problem)}") from problem
    return replace(found.graph, name=work.name)


def check_budget(budget: str, device: torch.device) -> int | None:
    """Raise for a budget that means nothing, before anything runs; returns the bytes that 'auto' stands for."""
    Settings(budget)
    return automatic_budget(device) if budget == "auto" else None


def compare(
    work: Workload,
    budget: str,
    device: torch.device,
    mode: Mode,
    *,
    steps: int = 10,
    time_limit: float = 30.0,
    verbose: bool | None = None,
    say: Say = lambda _text: None,
) -> Comparison:
    """Plain, recoup, checkpointed blocks and PyTorch's own budget, in the same mode. Takes the weights of ``work``.

    Raises :class:`BudgetError` if recoup cannot meet the budget; a peer that fails says so in its row.
    """
    automatic = check_budget(budget, device)
    source = Source(work, device)
    arena = Arena(source, steps, say)
    found: list[tuple[int, int]] = []

    def planned(model: nn.Module) -> Call:
        return optimize(work.target(model), budget, compile=mode, time_limit=time_limit, verbose=verbose)

    def read_plans(call: Call) -> None:
        peaks = [(made.peak_bytes, made.budget_bytes or 0) for made in plans(call)]
        if peaks:
            found.append((max(peak for peak, _ in peaks), max(limit for _, limit in peaks)))

    say("")  # the planner has a line of its own
    recoup = arena.run("recoup", planned, after=read_plans)
    predicted, limit = found[0] if found else (None, 0)
    plain = arena.run("plain", lambda model: _compiled(work.target(model), mode))
    limit = limit or automatic or resolve_budget(budget, plain.row.peak_bytes or 0) or 0  # no plan was needed
    outcomes = [plain, replace(recoup, row=replace(recoup.row, predicted_bytes=predicted))]
    outcomes.append(_block_checkpoints(arena, work, mode))
    outcomes.append(_own_budget(arena, work, mode, _share(budget, limit, plain.row.peak_bytes)))
    rows = tuple(_against(plain, outcome) for outcome in outcomes)
    return Comparison(work.name, _device_text(device), mode, limit, rows)


def _compiled(function: Call, mode: Mode) -> Call:
    return torch.compile(function) if mode == "inductor" else function


def _block_checkpoints(arena: Arena, work: Workload, mode: Mode) -> Outcome:
    name = "torch.utils.checkpoint"
    count = len(blocks(work.model))
    if count == 0:
        return Outcome(Row(name, note="no nn.Sequential or nn.ModuleList of blocks in this model"))

    def prepare(model: nn.Module) -> Call:
        checkpoint_blocks(model)
        return _compiled(work.target(model), mode)

    outcome = arena.run(name, prepare)
    return replace(outcome, row=replace(outcome.row, note=outcome.row.note or f"{count} blocks"))


def _share(budget: str, limit: int, plain_peak: int | None) -> float | None:
    """The budget as a share of the plain peak, if that is known."""
    try:
        return float(budget)
    except ValueError:
        return min(1.0, limit / plain_peak) if plain_peak else None


def _own_budget(arena: Arena, work: Workload, mode: Mode, share: float | None) -> Outcome:
    """PyTorch's own knob at the same share; it bounds the bytes saved for the backward pass, not the peak."""
    name = "PyTorch's own budget"
    if mode != "inductor":
        return Outcome(Row(name, note="activation_memory_budget needs --compile inductor"))
    if share is None:
        return Outcome(Row(name, note="takes a fraction, and the plain peak is not known"))
    around = functorch_config.patch(activation_memory_budget=share)
    outcome = arena.run(name, lambda model: _compiled(work.target(model), mode), around)
    return replace(outcome, row=replace(outcome.row, note=outcome.row.note or f"activation_memory_budget={share:.3g}"))


def _against(plain: Outcome, outcome: Outcome) -> Row:
    """The row with its gradients compared; a gradient that one of the two lacks counts as zero."""
    if outcome.row.peak_bytes is None or plain.row.peak_bytes is None:
        return outcome.row
    largest = 0.0
    for expected, found in zip(plain.gradients, outcome.gradients, strict=True):
        largest = max(largest, _largest_difference(expected, found))
    if largest == float("inf"):
        return replace(outcome.row, note=outcome.row.note or "gradients are not finite")
    return replace(outcome.row, gradient_difference=largest)


def _largest_difference(expected: Hidden | None, found: Hidden | None) -> float:
    cpu = torch.device("cpu")
    first, second = (None if part is None else part.tensor(cpu).to(torch.float64) for part in (expected, found))
    if first is None and second is None:
        return 0.0
    first = torch.zeros_like(second) if first is None else first  # type: ignore[arg-type]
    second = torch.zeros_like(first) if second is None else second
    if first.numel() == 0 or torch.equal(first, second):
        return 0.0
    return float((first - second).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def _more_or_less(ratio: float) -> str:
    return f"{100 * abs(ratio - 1):.0f} % {'more' if ratio > 1 else 'less'}"


def _device_text(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
