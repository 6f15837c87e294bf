"""Plans for a step that repeats: made in the background from what was written down of it, and, if need be, made anew.

A plan is made for the budget less a margin. If a run of the step then lacks room again and again, what it takes above
its plan is planned for, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from recoup.errors import RecoupError
from recoup.graph import Graph
from recoup.online.adapter import can_exchange
from recoup.online.background import Planning
from recoup.online.familiar import remembered
from recoup.online.orders import Order, memory_with_copies, orders, outliving, worthwhile
from recoup.online.writing import Writer
from recoup.schedule import Schedule

MARGIN = 0.005  # of the budget that a plan leaves for what is allocated past the dispatcher
_SECONDS = 10.0  # that a planner may take, in the background, for a small step
_OPS_PER_SECOND = 250  # more than that, for a large one
_GAP = 0.01
_TRIES = 3  # at plans: with more time, or for less where what is made again must be copied into its place
_LONGER = 3  # times the seconds of the try before that found nothing
_CUTS = 4  # how often a plan is made for less because runs lacked room


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do in a step, and what to know of it to be able to. Values and operators are called by numbers."""

    orders: list[list[Order]]
    """Before each operator."""
    counts: list[int]
    """How many values there are before each operator, and in all."""
    holds: set[int]
    """Values to hold after the program lets go of them, until they are evicted."""
    remembered: set[int]
    """The operators that must be known."""
    lost: set[int]
    """The values that are not there any more when what was made from them is made again."""


class Plans:
    """Of one step, under one budget."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.hopeless = False
        """Whether there will be none."""
        self._written: Writer | None = None
        self._planning: Planning | None = None
        self._schedule: Schedule | None = None
        self._tries = _TRIES
        self._spared = self._cuts = 0
        """Bytes of the budget that a plan must do without, because runs lacked them; how often it was made for less."""

    @property
    def under_way(self) -> bool:
        """Whether one is being made."""
        return self._planning is not None

    def stop(self) -> None:
        """Nobody waits for one any more."""
        if self._planning is not None:
            self._planning.stop()
            self._planning = None

    def begin(self, written: Writer) -> None:
        """Make the first one; a run of the step was written down."""
        try:
            graph = written.graph()
        except RecoupError:
            self.hopeless = True
            return
        self._written = written
        self._start(graph, self._room, _seconds(graph))

    def spare(self, shortage: int) -> None:
        """Make another one: runs lacked so much, whatever for, although they followed the last one. What was evicted
        for that meanwhile may hide most of it, so that it is twice as much from time to time."""
        if self._planning is None and self._schedule is not None and self._cuts < _CUTS:
            self._cuts += 1
            self._spared += max(self._spared, shortage)
            graph = self._schedule.graph
            self._start(graph, self._room, _seconds(graph))

    def new(self) -> Plan | None:
        """The one that is ready now and was not before. If it will not do, the next one is begun."""
        planning, written = self._planning, self._written
        if planning is None or written is None or not planning.done:
            return None
        self._schedule = schedule = planning.schedule() or self._schedule
        self.stop()
        self._tries -= 1
        if schedule is None and self._tries > 0:
            self._start(planning.graph, planning.budget, _LONGER * planning.seconds)
        elif schedule is None:
            self.hopeless = True
        elif not written.allows(schedule):
            self._schedule = None
            self._start(written.graph(strict=True), self._room, planning.seconds)
        elif (above := _copies(schedule) - self._room) > 0 and self._tries > 0:
            self._start(planning.graph, planning.budget - above, planning.seconds)
        else:
            return self._plan(schedule, written)
        return None

    def _plan(self, schedule: Schedule, written: Writer) -> Plan | None:
        ends = written.ends
        holds = {one: at for one, at in outliving(schedule, ends).items() if one not in written.replaced}
        try:
            told = orders(schedule, len(written.counts), ends, holds)
        except ValueError:  # in another order than the program's
            self.hopeless = True
            return None
        told = worthwhile(told, schedule, ends, self._room, not can_exchange())
        there = {**ends, **{one: at + 1 for one, at in holds.items()}}
        known, lost = remembered(schedule, told, there, holds)
        return Plan(told, [*written.counts, written.made], set(holds), known, lost)

    @property
    def _room(self) -> int:
        return int((1 - MARGIN) * self._budget) - self._spared

    def _start(self, graph: Graph, budget: int, seconds: float) -> None:
        try:
            self._planning = Planning(graph, budget, seconds, _GAP)
        except OSError:  # no process, or no file, can be made here
            self.hopeless = True


def _copies(schedule: Schedule) -> int:
    """What a schedule takes where what is made again must be copied into its place; elsewhere that is no more."""
    return 0 if can_exchange() else max(memory_with_copies(schedule, copies=True))


def _seconds(graph: Graph) -> float:
    return _SECONDS + len(graph.ops) / _OPS_PER_SECOND
