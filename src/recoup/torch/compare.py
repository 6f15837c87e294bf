"""One training step run in several ways, side by side: what ``recoup run``, ``demo`` and ``profile`` measure.

Each contender gets a fresh copy of the model and has the device to itself: what is kept for later (the weights the
copies start from, the gradients to compare) is kept where no count of live storages sees it.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from functorch.compile import config as functorch_config  # type: ignore[import-untyped]
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recoup.errors import CaptureError, RecoupError, SettingError
from recoup.graph import Graph
from recoup.torch.memory import automatic_budget, measure_peak
from recoup.torch.models import BlockModel
from recoup.torch.optimizing import arguments, optimize, plan, plans
from recoup.torch.session import RecoupWarning
from recoup.torch.settings import Mode, Settings
from recoup.units import Budget, resolve_budget

SEED = 0
Say = Callable[[str], None]
Call = Callable[..., Any]


@dataclass(frozen=True)
class Workload:
    """A model, the inputs of one step (a tensor, a tuple or a dict), and what makes a loss of its output.

    Without a loss the model's output is one if it is a scalar; else the step goes back from the outputs' norms.
    """

    name: str
    model: nn.Module
    inputs: Any
    loss: Callable[[Any], Tensor] | None = None

    def on(self, device: torch.device) -> Workload:
        """The same on ``device``."""
        loss = self.loss.to(device) if isinstance(self.loss, nn.Module) else self.loss
        return replace(self, model=self.model.to(device), inputs=_moved(self.inputs, device), loss=loss)

    def target(self, model: nn.Module) -> Call:
        """What is planned: the model, with the loss where there is one."""
        loss = self.loss
        if loss is None:
            return model

        def step(*args: Any, **kwargs: Any) -> Any:
            return loss(model(*args, **kwargs))

        return step

    def leaves(self, model: nn.Module) -> list[Tensor]:
        """Whose gradients one step leaves behind."""
        return [tensor for tensor in (*model.parameters(), *_tensors(self.inputs)) if tensor.requires_grad]


@dataclass(frozen=True)
class Row:
    """What one contender took; None where it was not measured, and then the note says why."""

    name: str
    predicted_bytes: int | None = None
    peak_bytes: int | None = None
    seconds: float | None = None
    gradient_difference: float | None = None
    note: str = ""

    def to_data(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "name": self.name,
            "predicted_peak_bytes": self.predicted_bytes,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
            "gradient_difference": self.gradient_difference,
            "note": self.note,
        }


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
    found = plan(
        work.target(work.model),
        work.inputs,
        budget,
        compile=mode,
        planner="checkpoint-all",
        verbose=verbose,
        estimate=estimate,
    ).graph
    return replace(found, name=work.name)


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
    source = _Source(work, device)
    arena = _Arena(source, mode, steps, say)
    found: list[tuple[int, int]] = []

    def planned(model: nn.Module) -> Call:
        return optimize(work.target(model), budget, compile=mode, time_limit=time_limit, verbose=verbose)

    def read_plans(call: Call) -> None:
        peaks = [(made.peak_bytes, made.budget_bytes or 0) for made in plans(call)]
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


@dataclass(frozen=True)
class _Hidden:
    """A tensor's contents outside PyTorch, where they count for no device."""

    dtype: torch.dtype
    shape: torch.Size
    contents: NDArray[Any]

    @staticmethod
    def of(tensor: Tensor) -> _Hidden:
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        return _Hidden(tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().copy())

    def tensor(self, device: torch.device) -> Tensor:
        """A new tensor with these contents."""
        return torch.from_numpy(self.contents.copy()).view(self.dtype).reshape(self.shape).to(device)


class _Source:
    """The model as it was given, emptied of its weights, which every copy gets anew. Tied weights stay tied."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        self.work = work
        self.device = device
        self._weights = [_Hidden.of(tensor) for tensor in _state(work.model)]
        for tensor in _state(work.model):
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=device)
            tensor.grad = None

    def model(self) -> nn.Module:
        """A fresh copy."""
        try:
            made = copy.deepcopy(self.work.model)
        except Exception as problem:
            raise CaptureError(
                f"the model cannot be copied, and each contender needs its own: {_first_line(problem)}"
            ) from problem
        for tensor, weight in zip(_state(made), self._weights, strict=True):
            tensor.data = weight.tensor(self.device)
        return made


@dataclass(frozen=True)
class _Outcome:
    row: Row
    gradients: list[_Hidden | None] = field(default_factory=list)


@dataclass(frozen=True)
class _Arena:
    """Runs contenders one after the other, each as if it were alone."""

    source: _Source
    mode: Mode
    steps: int
    say: Say

    def run(
        self,
        name: str,
        prepare: Callable[[nn.Module], Call],
        around: AbstractContextManager[Any] | None = None,
        after: Callable[[Call], None] = lambda _call: None,
    ) -> _Outcome:
        """Measure what ``prepare`` makes of a fresh model; failing is an outcome too, except for what is raised on
        purpose."""
        if name != "recoup":
            self.say(f"{name} ...")
        self._clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with around or nullcontext():
                    outcome = self._measure(name, prepare, after)
            except RecoupError:
                raise
            except torch.OutOfMemoryError:
                outcome = _Outcome(Row(name, note="out of memory"))
            except Exception as problem:
                if name == "plain":
                    raise CaptureError(f"the step fails as it is: {_first_line(problem)}") from problem
                outcome = _Outcome(Row(name, note=f"failed: {_first_line(problem)}"))
        notes = [str(entry.message) for entry in caught if issubclass(entry.category, RecoupWarning)]
        self._clear()
        self.say("")
        note = "; ".join([outcome.row.note] * bool(outcome.row.note) + list(dict.fromkeys(notes)))
        return replace(outcome, row=replace(outcome.row, note=note))

    def _measure(self, name: str, prepare: Callable[[nn.Module], Call], after: Callable[[Call], None]) -> _Outcome:
        work, device = self.source.work, self.source.device
        model = self.source.model()
        leaves = work.leaves(model)
        call = prepare(model)
        args, kwargs = arguments(work.inputs)

        def clear() -> None:
            for leaf in leaves:
                leaf.grad = None

        def step() -> None:
            _scalar(call(*args, **kwargs), work).backward()

        clear()
        torch.manual_seed(SEED)
        step()
        after(call)
        gradients = [None if leaf.grad is None else _Hidden.of(leaf.grad) for leaf in leaves]
        clear()
        peak = measure_peak(step, device)
        times = []
        for _ in range(self.steps):
            clear()
            _synchronize(device)
            start = time.perf_counter()
            step()
            _synchronize(device)
            times.append(time.perf_counter() - start)
        clear()
        return _Outcome(Row(name, None, peak, statistics.median(times)), gradients)

    def _clear(self) -> None:
        torch.compiler.reset()
        gc.collect()
        if self.source.device.type == "cuda":
            torch.cuda.empty_cache()


def _compiled(function: Call, mode: Mode) -> Call:
    return torch.compile(function) if mode == "inductor" else function


def _block_checkpoints(arena: _Arena, work: Workload, mode: Mode) -> _Outcome:
    name = "torch.utils.checkpoint"
    count = len(blocks(work.model))
    if count == 0:
        return _Outcome(Row(name, note="no nn.Sequential or nn.ModuleList of blocks in this model"))

    def prepare(model: nn.Module) -> Call:
        checkpoint_blocks(model)
        return _compiled(work.target(model), mode)

    outcome = arena.run(name, prepare)
    return replace(outcome, row=replace(outcome.row, note=outcome.row.note or f"{count} blocks"))


def checkpoint_blocks(model: nn.Module) -> None:
    """``torch.utils.checkpoint`` on every block, as a user would put it."""
    for block in blocks(model):
        block.forward = partial(_checkpointed, block.forward)


def _checkpointed(forward: Call, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def blocks(model: nn.Module) -> list[nn.Module]:
    """What one would checkpoint by hand: a built-in model's own list, else the longest sequence of modules in it."""
    if isinstance(model, BlockModel):
        return model.blocks()
    runs: list[list[nn.Module]] = [
        list(module.children())
        for module in model.modules()
        if isinstance(module, nn.Sequential | nn.ModuleList)
        and not any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in module.children())
    ]
    longest = max(runs, key=len, default=[])
    return longest if len(longest) > 1 else []


def _share(budget: str, limit: int, plain_peak: int | None) -> float | None:
    """The budget as a share of the plain peak, if that is known."""
    try:
        return float(budget)
    except ValueError:
        return min(1.0, limit / plain_peak) if plain_peak else None


def _own_budget(arena: _Arena, work: Workload, mode: Mode, share: float | None) -> _Outcome:
    """PyTorch's own knob at the same share; it bounds the bytes saved for the backward pass, not the peak."""
    name = "PyTorch's own budget"
    if mode != "inductor":
        return _Outcome(Row(name, note="activation_memory_budget needs --compile inductor"))
    if share is None:
        return _Outcome(Row(name, note="takes a fraction, and the plain peak is not known"))
    around = functorch_config.patch(activation_memory_budget=share)
    outcome = arena.run(name, lambda model: _compiled(work.target(model), mode), around)
    return replace(outcome, row=replace(outcome.row, note=outcome.row.note or f"activation_memory_budget={share:.3g}"))


def _against(plain: _Outcome, outcome: _Outcome) -> Row:
    """The row with its gradients compared; a gradient that one of the two lacks counts as zero."""
    if outcome.row.peak_bytes is None or plain.row.peak_bytes is None:
        return outcome.row
    largest = 0.0
    for expected, found in zip(plain.gradients, outcome.gradients, strict=True):
        largest = max(largest, _largest_difference(expected, found))
    if largest == float("inf"):
        return replace(outcome.row, note=outcome.row.note or "gradients are not finite")
    return replace(outcome.row, gradient_difference=largest)


def _largest_difference(expected: _Hidden | None, found: _Hidden | None) -> float:
    cpu = torch.device("cpu")
    first, second = (None if part is None else part.tensor(cpu).to(torch.float64) for part in (expected, found))
    if first is None and second is None:
        return 0.0
    first = torch.zeros_like(second) if first is None else first  # type: ignore[arg-type]
    second = torch.zeros_like(first) if second is None else second
    if first.numel() == 0 or torch.equal(first, second):
        return 0.0
    return float((first - second).abs().nan_to_num(nan=float("inf")).max())


def _scalar(result: Any, work: Workload) -> Tensor:
    """What the step goes back from."""
    tensors = [tensor for tensor in _tensors(result) if tensor.requires_grad]
    if isinstance(result, Tensor) and result.numel() == 1 and tensors:
        return result.reshape(())
    if work.loss is not None:
        shape = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise SettingError(f"the loss of {work.name} must be a scalar tensor that needs a gradient, not {shape}")
    if not tensors:
        raise SettingError(f"nothing that {work.name} returns needs a gradient, so there is no step to train")
    return torch.stack([torch.linalg.vector_norm(tensor).float() for tensor in tensors]).sum()


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _tensors(thing: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts (a dataclass output of a library is a mapping, as a rule)."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from _tensors(value)
    elif isinstance(thing, tuple | list):
        for value in thing:
            yield from _tensors(value)


def _moved(thing: Any, device: torch.device) -> Any:
    if isinstance(thing, Tensor):
        return thing.detach().to(device).requires_grad_(thing.requires_grad)
    if isinstance(thing, Mapping):
        return {key: _moved(value, device) for key, value in thing.items()}
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(_moved(value, device) for value in thing))
    if isinstance(thing, tuple | list):
        return type(thing)(_moved(value, device) for value in thing)
    return thing


def _more_or_less(ratio: float) -> str:
    return f"{100 * abs(ratio - 1):.0f} % {'more' if ratio > 1 else 'less'}"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_text(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _first_line(problem: BaseException) -> str:
    lines = str(problem).strip().splitlines() or [""]
    return f"{type(problem).__name__}: {lines[0]}"[:200]
