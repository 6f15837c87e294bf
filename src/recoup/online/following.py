"""One run of a step along its plan: orders, obeyed one after the other, and what must be held for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recoup.errors import BudgetError
from recoup.online.contents import Content
from recoup.online.keeper import Keeper
from recoup.online.orders import Order
from recoup.online.plans import Plan
from recoup.online.writing import Values


class Following:
    """Orders are advice: what cannot be done is not, and the runtime decides online from there on."""

    def __init__(self, plan: Plan, values: Values, keeper: Keeper) -> None:
        self.plan = plan
        self._values = values
        self._keeper = keeper
        self._obeyed = -1
        self._holding: dict[int, torch.UntypedStorage] = {}

    def obey(self, at: int) -> bool:
        """Do what is to be done before an operator; False if that cannot be."""
        if len(self._values) != self.plan.counts[at]:
            return False
        if self._obeyed == at:
            return True
        self._obeyed = at
        try:
            for order in self.plan.orders[at]:
                self._carry_out(order)
        except BudgetError:  # there is less room than was planned for
            return False
        return True

    def made(self, contents: Sequence[Content]) -> None:
        """The next values."""
        for value, content in enumerate(contents, len(self._values)):
            if value in self.plan.holds:
                self._holding[value] = content.memory()
        self._values.add(contents)

    def skip(self, after: int, until: int) -> None:
        """What the operators after one until another one made is not known."""
        self._values.skip(self.plan.counts[until + 1] - self.plan.counts[after + 1])

    def knew(self, at: int, made: Sequence[Content | None]) -> None:
        """What an operator made that was skipped."""
        self._values.put(self.plan.counts[at], made)

    def _carry_out(self, order: Order) -> None:
        for value in order.values:
            if order.evict:
                self._holding.pop(value, None)
            content = self._values.content(value)
            if content is None:
                continue
            if order.evict:
                self._keeper.evict(content)
            elif content.call is not None and not content.resident:
                self._keeper.bring_back([content])
