"""Learning: a program that repeats the same operators pays for the search once, as the paper asks for (section 7).

The program's operators are watched. When they turn out to repeat, and something is evicted, one step is written down as
a graph and planned in the background, and from then on the runtime follows the plan: what comes back and what goes
before an operator is an order, not a choice. Orders are advice, and so cannot do harm: the first operator that is not
the expected one ends them, and the runtime decides online until the step comes round again. A step that is followed, or
in which nothing is evicted, becomes familiar.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from recoup.errors import BudgetError
from recoup.online.adapter import can_exchange
from recoup.online.calls import flat_tensors
from recoup.online.contents import Content
from recoup.online.familiar import Glance, look_ahead
from recoup.online.following import Following
from recoup.online.keeper import Keeper
from recoup.online.learned import Learned
from recoup.online.operators import Traits, written_tensors
from recoup.online.plans import MARGIN, Plan, Plans
from recoup.online.repeats import Repeats
from recoup.online.writing import Ran, Values, Writer

_AGREE = 32  # operators at the end of a step by which it is recognised
_LOOK_EVERY = 16  # operators that pass, the allocator's count is looked up
_STUMBLES = 3  # of the guard over a plan in a row, before Python follows it for good
_LACKING = 3  # runs in a row in which more was evicted than planned, before that is planned for
_LOST = -1


class Guard(Protocol):
    """Lets operators of a familiar step pass without Python: see ``native/watch.h``."""

    def expect(self, numbers: list[int], light: list[bool], memory: list[int], highest: list[int]) -> None:
        """The step's operators, which of them may pass, what is allocated when they come, and at most from there on."""

    def plan(
        self,
        remembers: list[bool],
        orders: list[list[tuple[bool, tuple[int, ...]]]],
        counts: list[int],
        holds: set[int],
        lost: set[int],
    ) -> None:
        """What to know of the step, and what to do before each operator; nothing if nothing is to be done."""

    def begin_step(self, offset: int, margin: int, planned: bool, alone: bool) -> None:
        """Let them pass, with so much more allocated. ``planned``: not if they write to what may be made again.
        ``alone``: follow the plan, too."""

    def end_step(self) -> None:
        """Let none pass."""


class Learner:
    """Told of every operator before it runs and after; gives orders to the keeper."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self.guard: Guard | None = None
        self._values = Values()
        self._at: int = _LOST
        """Which operator of the step runs now."""
        self._glances: list[Glance] = []
        self._stumbles = 0
        """How many times in a row the guard could not follow the plan after all."""
        self._evictions = self._chosen = 0
        self._offset = self._passed = 0
        self._repeats = Repeats()
        self._watch()

    @property
    def lost(self) -> bool:
        """Whether it is not known where in the step the program is."""
        return self._at == _LOST

    @property
    def at(self) -> int:
        """Which operator of the step came last."""
        return self._at

    def turn(self, alone: bool) -> None:
        """The next operator is the first one of the step, which has a plan; ``alone``: the guard followed it."""
        self._stumbles = 0 if alone else self._stumbles
        self._begin(alone=self._can_go_alone and self._stumbles < _STUMBLES)
        self._turned = True

    def interrupt(self, strays: bool, wonders: bool) -> None:
        """The guard cannot follow the plan any further. If that is not because the program ``strays``, we go on with
        it; and from now on if that happens again and again, and not because it ``wonders`` about an operator that it
        does not know yet."""
        if strays:
            self.lose()
        elif self.guard is not None:
            self._stumbles += not wonders
            self.guard.end_step()
            self._let_pass(self.guard, alone=False)

    def knew(self, at: int, made: Sequence[Content | None]) -> None:
        """What an operator made for which the guard followed the plan."""
        if self._following:
            self._following.knew(at, made)

    def stop(self) -> None:
        """The block is over."""
        self._plans.stop()

    def passes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], traits: Traits) -> Learned | None:
        """An operator of a familiar step, if it may run with no more than this."""
        at = self._at + 1
        if at == len(self._step):
            return None  # the step's first one is never light
        glance = self._glances[at]
        if not glance.light:
            return None
        if not glance.fits(func, args):
            self.lose()
            return None
        if self._following:
            changed = written_tensors(traits, args, kwargs) if traits.writes else []
            changed += traits.updated(args)
            if changed and self._keeper.matters(changed):
                return None
        if not self._is_as_expected(glance):
            return None
        self._at = at
        if self._following:
            self._follow(at)
            if not self._following:
                return None
            try:
                self._keeper.bring_back_tensors(flat_tensors((args, tuple(kwargs.values())), []))  # if the plan did not
            except BudgetError:
                self.lose()
                return None
            self._following.skip(at - 1, at)
        return glance.known

    def passed(self, at: int, over: bool) -> None:
        """Operators of a familiar step passed the guard, up to this one; ``over``: more is allocated than expected."""
        if self._following:  # since the last one that came here, or since the step turned
            self._following.skip(self._at if at >= self._at else -1, at)
        self._at = at
        if over:
            self._stumbles += 1
            self.lose()
            self._glances = []

    def saw(self, numbers: list[int], held: list[int]) -> None:
        """Operators ran that nobody waited for."""
        for number, holds in zip(numbers, held, strict=True):
            if self._at == _LOST:
                self._look_for_step(number, holds)
            elif self._step[(self._at + 1) % len(self._step)] == number:
                self._at = (self._at + 1) % len(self._step)
            else:
                self.lose()

    def _is_as_expected(self, glance: Glance) -> bool:
        """Whether not so much more is allocated than when the step was recorded that it could break the budget, or,
        where no plan says what to evict then, that it grows. If that takes long to look up, now and then."""
        expected = glance.memory + self._offset
        budget = self._keeper.report.budget_bytes
        most = budget - (glance.later - glance.memory)
        self._passed += 1
        if self.guard is not None or self._passed % _LOOK_EVERY == 0:
            self._keeper.look()
            if self._keeper.memory > (most if self._following else min(most, expected + MARGIN * budget)):
                self.lose()
                self._glances = []
                return False
        else:
            self._keeper.memory = expected
        return True

    def before(self, known: Learned, func: Any, args: tuple[Any, ...], traits: Traits) -> None:
        """An operator is about to run: find out where in the step that is, and do what is to be done before it."""
        number = known.alike
        if self._at == _LOST:
            self._look_for_step(number, self._keeper.wanted)
            return
        at = (self._at + 1) % len(self._step)
        if self._step[at] != number:
            self.lose()
            return
        self._at = at
        if at == 0 and not self._turned:
            self._begin(alone=False)
        self._turned = False
        if self._writer is not None:
            self._writer.before()
        if self.familiar:
            self._count(at)
        elif self._recorded is not None:
            light = at > 0 and not (self._following and (at in self._following.plan.remembered or traits.moves_storage))
            self._recorded.append(Glance(func, args, traits, known, self._keeper.memory, light))
        if self._following:
            self._follow(at)
        if self._recorded:
            self._recorded[-1].highest = self._keeper.memory + known.size + known.workspace

    def ahead(self) -> None:
        """Something evicted is looked at, for the operator to come: do now what is to be done before that."""
        if self._following and self._at + 1 < len(self._step):
            if self.familiar:
                self._count(self._at + 1)
            self._follow(self._at + 1)

    def _count(self, at: int) -> None:
        """What is allocated before an operator of a familiar step; that passed unseen."""
        if self.guard is not None:
            self._keeper.look()
        else:
            self._keeper.memory = self._glances[at].memory + self._offset

    def after(self, ran: Ran) -> None:
        """It has run."""
        if self.familiar and not self._following:  # what passes after it may write over what it made
            for content in ran.makes:
                self._keeper.losses.fix(content)
        if self._writer is None and not self._following:
            return
        if self._following is None:
            self._values.add(ran.makes)
        elif self.familiar and self._at not in self._following.plan.remembered:  # what it wrote to may be unknown
            self._following.skip(self._at - 1, self._at)
        else:
            self._following.made(ran.makes)
        if self._writer is not None:
            self._writer.after(ran)

    # where the program is

    def _watch(self) -> None:
        """No step is known."""
        self._step: list[int] = []
        self._recent: deque[int] = deque(maxlen=_AGREE)
        self._at = _LOST
        self._plans = Plans(self._keeper.report.budget_bytes)
        self._plan: Plan | None = None
        self._can_go_alone: bool = False
        """Whether the guard can follow it, as far as is known."""
        self._stumbles = 0
        self._lacking = 0
        """How many runs in a row lacked room although it was followed."""
        self._glances = []
        self._forget_run()

    def _forget_run(self) -> None:
        """Nothing is known of a current run of the step."""
        self._following: Following | None = None
        self._turned = False
        """Whether the step's first operator is to come next, and has been prepared for."""
        self.familiar = False
        """Whether operators may pass."""
        self._recorded: list[Glance] | None = None
        self._values = self._values.next_run()
        self._writer: Writer | None = None
        self._keeper.on_release = None
        if self.guard is not None:
            self.guard.end_step()

    def lose(self) -> None:
        """The program does something else."""
        if self.familiar:
            self._keeper.look()
        self._at = _LOST
        self._recent.clear()
        self._repeats.cut()
        self._forget_run()

    def _look_for_step(self, number: int, held: int) -> None:
        self._recent.append(number)
        end = self._step[-_AGREE:]
        if end and list(self._recent)[-len(end) :] == end:
            self._at = len(self._step) - 1
            return
        self._repeats.add(number, held)
        found = self._repeats.find()
        if found is None:
            return
        self._repeats.cut()
        step, at = found
        if step != self._step:
            self.stop()
            self._watch()
            self._step = step
        self._at = (at - 1) % len(step)

    def _begin(self, alone: bool) -> None:
        """A run of the step begins; ``alone``: the guard follows its plan, if there is one."""
        report = self._keeper.report
        calm = report.evictions == self._evictions
        as_ordered = self._keeper.chosen == self._chosen
        self._evictions, self._chosen = report.evictions, self._keeper.chosen
        if self._following:
            report.followed += 1
            self._lacking = 0 if as_ordered else self._lacking + 1
        elif self._writer is not None:
            self._plans.begin(self._writer)
        plan = self._plans.new()
        if plan is not None:
            self._plan = plan
            self._glances, self._recorded = [], None
            self._stumbles = self._lacking = 0
        elif self._lacking >= _LACKING:
            self._lacking = 0
            self._plans.spare(self._keeper.shortage)
        self._keeper.shortage = 0
        recorded = self._recorded if as_ordered else None
        self._forget_run()
        if self._plan is not None:
            self._following = Following(self._plan, self._values, self._keeper)
        if self._following or calm:
            self._become_familiar(recorded, alone)
        else:
            self._glances = []
        if not (calm or self._plan or self._plans.under_way or self._plans.hopeless):
            self._writer = Writer(max(self._keeper.memory, self._keeper.wanted), self._values)
            self._keeper.on_release = self._writer.released

    def _become_familiar(self, recorded: list[Glance] | None, alone: bool) -> None:
        """If a whole run was recorded; else record one."""
        if not self._keeper.can_look:
            return
        if not self._glances and recorded is not None and len(recorded) == len(self._step):
            self._glances = recorded
            look_ahead(recorded)
            self._describe_step()
        self._keeper.look()
        if not self._glances:
            self._recorded = []
            return
        self._offset = self._keeper.memory - self._glances[0].memory
        fits = self._glances[0].later + self._offset <= self._keeper.report.budget_bytes
        self.familiar = fits and (self._following is not None or self._keeper.settle())
        if self.familiar and self.guard is not None:
            self._let_pass(self.guard, alone)

    def _let_pass(self, guard: Guard, alone: bool) -> None:
        margin = int(MARGIN * self._keeper.report.budget_bytes)
        follows = self._following is not None
        guard.begin_step(self._offset, margin, follows, follows and alone)

    def _describe_step(self) -> None:
        """To the guard: what has orders before it, or must be known, comes here."""
        if self.guard is None:
            return
        plan = self._following.plan if self._following else Plan([[]] * len(self._step), [], set(), set(), set())
        light = [glance.light and not before for glance, before in zip(self._glances, plan.orders, strict=True)]
        numbers = [glance.known.alike for glance in self._glances]
        memory = [glance.memory for glance in self._glances]
        highest = [glance.later for glance in self._glances]
        self.guard.expect(numbers, light, memory, highest)
        remembers = [at in plan.remembered for at in range(len(self._glances))]
        self._can_go_alone = self._following is not None and can_exchange()
        self._can_go_alone &= all(map(Glance.passes_alone, self._glances, remembers))
        told = [[(order.evict, order.values) for order in before] for before in plan.orders]
        self.guard.plan(remembers, told if self._can_go_alone else [], plan.counts, plan.holds, plan.lost)

    def _follow(self, at: int) -> None:
        """Do what is to be done before an operator, as far as there is a plan."""
        if self._following is not None and not self._following.obey(at):
            self.lose()
