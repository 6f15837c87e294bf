"""Learning: a program that repeats the same operators pays for the search once, as the paper asks for (section 7).

As soon as something is evicted, the program's operators are watched. When they turn out to repeat, one step is written
down as a graph and planned in the background, and from then on the runtime follows the plan: what comes back and what
goes before an operator is an order, not a choice. Orders are advice, and so cannot do harm: the first operator that is
not the expected one ends them, and the runtime decides online until the step comes round again.
"""

from __future__ import annotations

from collections import deque

from recoup.errors import BudgetError, RecoupError
from recoup.graph import Graph
from recoup.online.adapter import CAN_EXCHANGE
from recoup.online.background import Planning
from recoup.online.keeper import Keeper
from recoup.online.orders import Order, orders, peak_with_copies
from recoup.online.repeats import Repeats
from recoup.online.writing import Ran, Values, Writer
from recoup.schedule import Schedule

_SECONDS = 10.0  # that a planner may take, in the background
_GAP = 0.01
_MARGIN = 0.005  # of the budget that a plan leaves for what is allocated past the dispatcher
_TRIES = 3  # at plans: with more time, or for less where what is made again must be copied into its place
_LONGER = 3  # times the seconds of the try before that found nothing
_AGREE = 32  # operators at the end of a step by which it is recognised
_LOST = -1


class Learner:
    """Told of every operator before it runs and after; gives orders to the keeper."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._values = Values()
        self._at: int = _LOST
        """Which operator of the step runs now."""
        self._planning: Planning | None = None
        self._tries = 0
        self._schedule: Schedule | None = None
        self._watch()

    def stop(self) -> None:
        """The block is over."""
        if self._planning is not None:
            self._planning.stop()
            self._planning = None

    def before(self, number: int) -> None:
        """An operator is about to run: find out where in the step that is, and do what is to be done before it."""
        if self._at == _LOST:
            self._look_for_step(number)
            return
        at = (self._at + 1) % len(self._step)
        if self._step[at] != number:
            self._lose()
            return
        self._at = at
        if at == 0:
            self._begin()
        if self._writer is not None:
            self._writer.before()
        if self._following:
            self._follow(at)

    def ahead(self) -> None:
        """Something evicted is looked at, for the operator to come: do now what is to be done before that."""
        if self._following and self._at + 1 < len(self._step):
            self._follow(self._at + 1)

    def after(self, ran: Ran) -> None:
        """It has run."""
        if self._writer is None and not self._following:
            return
        self._values.add(ran.makes)
        if self._writer is not None:
            self._writer.after(ran)

    # where the program is

    def _watch(self) -> None:
        """Nothing is known of the program."""
        self._repeats = Repeats()
        self._step: list[int] = []
        self._recent: deque[int] = deque(maxlen=_AGREE)
        self._at = _LOST
        self._hopeless = False
        self._orders: list[list[Order]] = []
        self._written: Writer | None = None
        """What was written down of the step."""
        self._forget_run()

    def _forget_run(self) -> None:
        """Nothing is known of a current run of the step."""
        self._following = False
        self._obeyed = _LOST
        self._values = self._values.next_run()
        self._writer: Writer | None = None
        self._keeper.on_release = None

    def _lose(self) -> None:
        self._at = _LOST
        self._recent.clear()
        self._repeats = Repeats()
        self._forget_run()

    def _look_for_step(self, number: int) -> None:
        self._recent.append(number)
        end = self._step[-_AGREE:]
        if end and list(self._recent)[-len(end) :] == end:
            self._at = len(self._step) - 1
            return
        self._repeats.add(number, self._keeper.wanted)
        found = self._repeats.find()
        if found is None:
            return
        step, at = found
        if step != self._step:
            self.stop()
            self._watch()
            self._step = step
        self._at = (at - 1) % len(step)

    def _begin(self) -> None:
        """A run of the step begins."""
        if self._following:
            self._keeper.report.followed += 1
        elif self._writer is not None:
            self._plan(self._writer)
        elif self._planning is not None and self._planning.done:
            self._take_orders(self._planning)
        wanted = not (self._orders or self._planning or self._hopeless)
        self._forget_run()
        if wanted:
            self._writer = Writer(max(self._keeper.memory, self._keeper.wanted), self._values)
            self._keeper.on_release = self._writer.released
        self._following = bool(self._orders)

    # plans

    def _plan(self, writer: Writer) -> None:
        try:
            graph = writer.graph()
        except RecoupError:
            self._hopeless = True
            return
        self._written = writer
        self._tries = _TRIES
        self._schedule = None
        self._start_planning(graph, self._room, _SECONDS)

    @property
    def _room(self) -> int:
        return int((1 - _MARGIN) * self._keeper.report.budget_bytes)

    def _start_planning(self, graph: Graph, budget: int, seconds: float) -> None:
        try:
            self._planning = Planning(graph, budget, seconds, _GAP)
        except OSError:  # no process, or no file, can be made here
            self._hopeless = True

    def _take_orders(self, planning: Planning) -> None:
        self._schedule = planning.schedule() or self._schedule
        self.stop()
        self._tries -= 1
        above = 0
        if self._schedule is not None and not CAN_EXCHANGE:
            above = peak_with_copies(self._schedule) - self._room
        if self._schedule is None and self._tries > 0:
            self._start_planning(planning.graph, planning.budget, _LONGER * planning.seconds)
        elif above > 0 and self._tries > 0:
            self._start_planning(planning.graph, planning.budget - above, planning.seconds)
        elif self._schedule is not None and self._written is not None:
            try:
                self._orders = orders(self._schedule, len(self._step), self._written.ends)
            except ValueError:  # in another order than the program's
                self._hopeless = True
        else:
            self._hopeless = True

    def _follow(self, at: int) -> None:
        if self._written is None or len(self._values) != self._written.counts[at]:
            self._lose()
            return
        if self._obeyed == at:
            return
        self._obeyed = at
        try:
            for order in self._orders[at]:
                self._obey(order)
        except BudgetError:  # there is less room than was planned for
            self._lose()

    def _obey(self, order: Order) -> None:
        for value in order.values:
            content = self._values.content(value)
            if content is None:
                continue
            if order.evict:
                self._keeper.evict(content)
            elif content.call is not None and not content.resident:
                self._keeper.bring_back([content])
