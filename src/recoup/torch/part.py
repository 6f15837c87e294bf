"""A captured part of the user's program: planned for each shape and each amount of resident memory it meets."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from recoup.errors import BudgetError
from recoup.planfile import Plan
from recoup.torch import compiled, eager
from recoup.torch.internals.dynamo import graph_break, has_maximum, largest_sizes
from recoup.torch.internals.graphs import UNTRACEABLE
from recoup.torch.memory import allocated_size, is_on
from recoup.torch.planning import StepPlanner
from recoup.torch.progress import Reporter
from recoup.torch.scalars import read_scalars
from recoup.torch.session import Session, hundredths

VARIANTS = 512  # how many shapes, or values of numbers, a part is compiled for before the first is forgotten
_compiling = threading.RLock()
"""Planning, which measures, is not for several threads at a time."""


@dataclass(frozen=True)
class Variant:
    """A part compiled for one shape and at most ``resident`` bytes around it. Nothing is planned without a gradient."""

    function: Callable[..., Any]
    resident: int
    plan: Plan | None
    need: int = 0
    """Bytes above the resident ones at the peak of the plain step."""


class Planned(BaseException):  # it ends a run that only wanted the plan, whatever the program catches
    """The plan that was asked for."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


class Part:
    """Called like the graph that Dynamo captured; plans it when a call is not covered by what was planned before."""

    def __init__(self, session: Session, module: fx.GraphModule) -> None:
        self.session = session
        self.scalars = read_scalars(module)
        self.ends_early = graph_break(module)
        self.share_later = 0.5 if self.ends_early and not session.only_plan else 0.0
        """Share of the memory above the resident part that is left to parts that run after this one."""
        self.most_share = 1.0
        """More than this cannot be left to them."""
        self.later_gradients = 0
        """Bytes of gradients that those have made when this one's backward begins."""
        self._leaves: list[weakref.ref[torch.Tensor]] = []
        self.variants: dict[Any, list[Variant]] = {}
        self.current: Variant | None = None
        self._device = torch.device("cpu")
        self._dynamic = [index for index in _dynamic_positions(module) if index not in self.scalars.ints]
        self._most = _most(module, self._dynamic)
        """The largest sizes of the inputs that vary, until they are planned for."""
        if self.scalars.by_value:
            session.note(
                "a number that changes from call to call is used for more than arithmetic with tensors: the step is "
                "traced for each of its values; as a tensor it need not be"
            )
        if self.ends_early:
            session.note_breaks([self.ends_early], "the program is planned in parts; one ends here")

    def __call__(self, *args: Any) -> Any:
        """Run this part by its plan."""
        self.session.calls += 1
        given = self.scalars.given(args)
        variant = self._variant(given)
        self.current = variant
        if variant.plan is not None:
            self.session.ran.append(self)
            self._leaves = _leaves(args) if len(self.session.parts) > 1 else []
        return variant.function(*given)

    def new_gradients(self) -> int:
        """Bytes of the gradients that this part makes where there are none now."""
        leaves = {id(leaf): leaf for found in self._leaves if (leaf := found()) is not None}
        missing = [leaf for leaf in leaves.values() if leaf.grad is None and is_on(leaf.device, self._device)]
        return sum(allocated_size(leaf.numel() * leaf.element_size(), self._device) for leaf in missing)

    def _variant(self, args: Sequence[Any]) -> Variant:
        session = self.session
        if self.current is None:
            self._device = session.device(args)
        device = self._device
        resident = session.resident(device, args)
        fitting = [variant for variant in self.variants.get(self._key(args), ()) if resident <= variant.resident]
        if fitting:
            return min(fitting, key=lambda variant: variant.resident)
        with _compiling:
            if self._most and any(map(has_maximum, args)) and not session.only_plan:
                self._compile_largest(args, device)
            variant = self._compile_sharing(args, device)
        self.variants.setdefault(self._key(args), []).append(variant)
        if len(self.variants) > VARIANTS:
            del self.variants[next(iter(self.variants))]
        return variant

    def _key(self, args: Sequence[Any]) -> Any:
        shapes = (_sizes(args[index]) for index in self._dynamic)
        return self.share_later, self.later_gradients, _learning(args), *shapes, *self.scalars.key(args)

    def _compile_largest(self, args: Sequence[Any], device: torch.device) -> None:
        """Plan for the largest shape that the user marked, with inputs that are made up: others follow that plan."""
        sizes = self._most
        if all(sizes[index] == _sizes(args[index]) for index in sizes):
            self._most = {}
            return
        largest = [_enlarged(arg, sizes[index]) if index in sizes else arg for index, arg in enumerate(args)]
        try:
            self._compile_sharing(largest, device)
        except BudgetError as problem:
            marked = ", ".join(str(sizes[index]) for index in sizes if isinstance(args[index], torch.Tensor))
            raise BudgetError(f"{problem}; this is for the largest sizes that were marked: {marked}") from None
        self._most = {}

    def _compile_sharing(self, args: Sequence[Any], device: torch.device) -> Variant:
        """Compile it, and leave less to later parts if it does not fit otherwise."""
        while True:
            try:
                return self._compile(args, device, self.session.resident(device, args, anew=True))
            except BudgetError:
                if not self.share_later:
                    raise
                self.share_later = self.most_share = hundredths(self.share_later / 2)

    def _compile(self, args: Sequence[Any], device: torch.device, resident: int) -> Variant:
        session = self.session
        mode = session.mode(device)
        module = self.scalars.fixed(args)
        drawn = random.getstate()  # what is imported and run from here on may draw, too
        known = session.known.get(device, [])
        with Reporter(session.settings.verbose) as reporter:
            planner = StepPlanner(
                session.settings,
                session.store(device),
                session.budget(device),
                mode,
                resident,
                self.share_later,
                self.later_gradients,
                known if self._dynamic or self.scalars.by_value else (),
                session.settings.plan is None and not session.only_plan,
                max((step.budget for step in known), default=0),
                known[-1].correction if known else 0,
                reporter,
            )
            compile_step = eager.compile_step if mode == "eager" else compiled.compile_step
            try:
                function, step = compile_step(module, args, planner)
            except BudgetError as problem:
                if not session.breaks:
                    raise
                raise BudgetError(
                    f"{problem}; this is one of several parts of the program, and with more the others take their share"
                ) from None
            except UNTRACEABLE as problem:
                session.note(f"a part of the program depends on numbers in a tensor and runs unplanned: {problem}")
                function, step = module, None
            finally:
                random.setstate(drawn)
        gc.collect()  # what tracing leaves behind must not count as resident
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if step is None:
            return Variant(function, 2**62, None)
        if session.only_plan:
            raise Planned(step.plan)
        session.remember(device, step)
        return Variant(function, step.resident, step.plan, step.need)


def _leaves(args: Sequence[Any]) -> list[weakref.ref[torch.Tensor]]:
    return [weakref.ref(arg) for arg in args if isinstance(arg, torch.Tensor) and arg.is_leaf and arg.requires_grad]


def _learning(args: Sequence[Any]) -> tuple[tuple[bool, bool], ...]:
    """Which inputs want a gradient: Dynamo of torch 2.11 does not notice when a parameter is unfrozen."""
    return tuple((arg.requires_grad, arg.is_leaf) for arg in args if isinstance(arg, torch.Tensor))


def _dynamic_positions(module: fx.GraphModule) -> list[int]:
    """Which inputs of the captured graph can change shape from call to call."""
    positions = []
    for index, node in enumerate(module.graph.find_nodes(op="placeholder")):
        example = node.meta.get("example_value")
        shape = example.shape if isinstance(example, torch.Tensor) else (example,)
        if any(isinstance(size, torch.SymInt) for size in shape):
            positions.append(index)
    return positions


def _most(module: fx.GraphModule, positions: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The largest sizes at these positions; none if one of them may grow without bound."""
    nodes = module.graph.find_nodes(op="placeholder")
    found = {index: largest_sizes(nodes[index].meta.get("example_value")) for index in positions}
    return {} if None in found.values() else {index: sizes for index, sizes in found.items() if sizes is not None}


def _enlarged(arg: Any, sizes: tuple[int, ...]) -> Any:
    """An input like the one given, laid out like it, with zeros, which every op can take."""
    if not isinstance(arg, torch.Tensor):
        return sizes[0]
    order = sorted(range(arg.dim()), key=lambda dim: arg.stride(dim), reverse=True)
    zeros = torch.zeros([sizes[dim] for dim in order], dtype=arg.dtype, device=arg.device)
    zeros = zeros.permute([order.index(dim) for dim in range(arg.dim())]).requires_grad_(arg.requires_grad)
    return zeros if arg.is_leaf else zeros.clone()


def _sizes(arg: Any) -> tuple[int, ...]:
    return tuple(arg.shape) if isinstance(arg, torch.Tensor) else (arg,)
