"""One optimized model: its settings, its device, its parts, and what is resident around them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from recoup.errors import RecoupWarning
from recoup.torch.internals.dynamo import Break
from recoup.torch.memory import automatic_budget, live_bytes, resident_bytes
from recoup.torch.settings import Mode, Settings
from recoup.torch.store import Store, conditions
from recoup.units import Budget

if TYPE_CHECKING:
    from recoup.torch.part import Part
    from recoup.torch.planning import StepPlan

SCANS = 64  # how many different sights of memory are remembered: parts of a program, with and without gradients
TRUSTED = 100  # how often one is taken for granted before memory is looked at again
_optimizer_tensors: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
"""How many tensors each optimizer holds."""
_optimizer_changes = 0
"""How often that has changed."""


def _count_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    states = optimizer.state.values()
    things = (thing for state in states for thing in (state.values() if isinstance(state, dict) else (state,)))
    held = sum(len(thing) if isinstance(thing, list) else 1 for thing in things)
    if held != _optimizer_tensors.get(optimizer):
        global _optimizer_changes
        _optimizer_tensors[optimizer] = held
        _optimizer_changes += 1


register_optimizer_step_post_hook(_count_state)


@dataclass
class Session:
    """What the parts of one program share. A program without graph breaks has one part."""

    settings: Settings
    only_plan: bool = False
    """Stop at the first plan, before anything runs."""
    calls: int = 0
    """How many captured parts were called since the user's function was."""
    parts: list[Part] = field(default_factory=list)
    ran: list[Part] = field(default_factory=list)
    """The parts that ran forward in the current call, in order."""
    breaks: dict[str, Break] = field(default_factory=dict)
    """What was not captured, by where it is."""
    known: dict[torch.device, list[StepPlan]] = field(default_factory=dict)
    """Every plan made so far, by device."""
    _store: Store | None = None
    _automatic: dict[torch.device, int] = field(default_factory=dict)
    _scanned: dict[object, list[int]] = field(default_factory=dict)
    """The bytes that were resident, by what was seen then, and how often that was taken for granted: the last few."""

    def begin(self) -> None:
        """The user's function is being called."""
        if len(self.ran) > 1:
            self._share()
        self.ran.clear()
        self.calls = 0

    def _share(self) -> None:
        """After a call in several parts: leave to the later ones what they need of the plain step, in proportion.

        A part that ran twice leaves what it did the first time, which is more.
        """
        needs = [max(part.current.need, 1) for part in self.ran if part.current is not None]
        gradients = [part.new_gradients() for part in self.ran]
        for index, part in reversed(list(enumerate(self.ran))):
            share = sum(needs[index + 1 :]) / sum(needs[index:])
            part.share_later = min(part.most_share, hundredths(share))  # a little more is no new plan
            part.later_gradients = sum(gradients[index + 1 :])

    def remember(self, device: torch.device, step: StepPlan) -> None:
        """A plan, in place of the same one for something smaller."""
        known = self.known.setdefault(device, [])
        steps = step.plan.schedule.steps()
        others = [other for other in known if other.plan.schedule.steps() != steps]
        same = [other for other in known if other.plan.schedule.steps() == steps]
        if all(_size(other) < _size(step) for other in same):
            known[:] = [*others, step]

    def device(self, args: Sequence[Any]) -> torch.device:
        """The accelerator that holds most of the inputs' bytes; the CPU only where there is none."""
        sizes: dict[torch.device, int] = {}
        for arg in args:
            if isinstance(arg, torch.Tensor):
                sizes[arg.device] = sizes.get(arg.device, 0) + arg.numel() * arg.element_size()
        return max(sizes, key=lambda device: (device.type == "cuda", sizes[device]), default=torch.device("cpu"))

    def store(self, device: torch.device) -> Store:
        """The measurements and plans for the device."""
        if self._store is None or self._store.device != device or self._store.measured_with != conditions(device):
            self._store = Store.open(device, self.settings.cache)
        return self._store

    def budget(self, device: torch.device) -> Budget:
        """The budget as given; what 'auto' means is asked once."""
        if self.settings.budget != "auto":
            return self.settings.budget
        if device not in self._automatic:
            self._automatic[device] = automatic_budget(device)
        return self._automatic[device]

    def mode(self, device: torch.device) -> Mode:
        """Compiled on CUDA, eager elsewhere, unless the user chose."""
        compiles = device.type == "cuda" and not self.settings.estimate
        return self.settings.compile or ("inductor" if compiles else "eager")

    def resident(self, device: torch.device, args: Sequence[Any], anew: bool = False) -> int:
        """Bytes on the device now. On CPU live storages are searched for only ``anew``, or when the inputs, their
        gradients or optimizer state, the things that grow, have changed in size, or other parts ran before."""
        if device.type == "cuda":
            return resident_bytes(device)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        grads = [arg.grad for arg in tensors if arg.is_leaf and arg.grad is not None]
        sizes = live_bytes(tensors, device), live_bytes(grads, device)
        token = (sizes, _optimizer_changes, tuple(id(part.current) for part in self.ran))
        seen = self._scanned.get(token)
        if anew or seen is None or seen[1] == TRUSTED:
            if len(self._scanned) >= SCANS:
                self._scanned.clear()
            self._scanned[token] = seen = [resident_bytes(device), 0]
        seen[1] += 1
        return seen[0]

    def note_breaks(
        self,
        breaks: Iterable[Break],
        what: str = "the program is not captured here, and what runs here is not planned",
    ) -> None:
        """Tell the user ``what`` these mean, once for each place."""
        for one in breaks:
            if one.where not in self.breaks:
                self.breaks[one.where] = one
                self.note(f"{what}: {one}")

    def note(self, text: str) -> None:
        """Tell the user."""
        warnings.warn(text, RecoupWarning, stacklevel=2)


def _size(step: StepPlan) -> int:
    return sum(value.bytes for value in step.plan.graph.values)


def hundredths(share: float) -> float:
    """Rounded down, so that some is left to all."""
    return math.floor(100 * share) / 100
