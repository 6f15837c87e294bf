"""What a run under DTR did: for people to read, and to warn them in time."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from recoup.errors import RecoupWarning
from recoup.units import format_bytes


@dataclass
class Report:
    """Counted while the block runs. Seconds of operators are what each takes by its own measurements."""

    budget_bytes: int
    peak_bytes: int = 0
    wanted_bytes: int = 0
    """What the program would have held at its peak with nothing evicted."""
    evictions: int = 0
    rematerializations: int = 0
    followed: int = 0
    """Steps in which a plan was followed, because the program repeats them."""
    base_seconds: float = 0.0
    remat_seconds: float = 0.0
    search_seconds: float = 0.0
    bookkeeping_seconds: float = 0.0
    kept: list[str] = field(default_factory=list)
    """Operators whose results were kept because they cannot be repeated."""
    exceeded: dict[str, int] = field(default_factory=dict)
    """Operators that took more to work in than was known of them, and bytes by which that broke the budget."""
    _warned: bool = False
    _since: tuple[float, float, int] = (0.0, 0.0, 0)
    """What was taken, repeated, and how often, when thrashing was last excused."""

    def reached(self, memory: int, wanted: int = 0) -> None:
        """So much memory is, or will be, in use; ``wanted`` if nothing had been evicted."""
        if memory > self.peak_bytes:
            self.peak_bytes = memory
        if wanted > self.wanted_bytes:
            self.wanted_bytes = wanted

    def keep(self, operator: str) -> None:
        """Note an operator that cannot be repeated."""
        if operator not in self.kept:
            self.kept.append(operator)

    def exceed(self, operator: str, memory: int) -> None:
        """An operator brought the allocator's count to so much."""
        if memory > self.budget_bytes:
            self.exceeded[operator] = max(self.exceeded.get(operator, 0), memory - self.budget_bytes)

    def check(self, limit: float | None) -> None:
        """Warn once when repeating takes more than the limit allows."""
        if limit is None or self._warned:
            return
        before, before_repeated, before_count = self._since
        taken, repeated = self.base_seconds - before, self.remat_seconds - before_repeated
        if taken and taken + repeated > limit * taken and self.rematerializations - before_count > 100:
            self._warned = True
            better = (self.budget_bytes + self.wanted_bytes) // 2
            warnings.warn(
                f"operators take more than {limit:g} times what they take once: {format_bytes(self.budget_bytes)} is "
                f"little for this program, which wants {format_bytes(self.wanted_bytes)}; try {format_bytes(better)}",
                RecoupWarning,
                stacklevel=2,
            )

    def excuse(self) -> None:
        """What was repeated so far was for want of knowledge, not of memory."""
        self._since = self.base_seconds, self.remat_seconds, self.rematerializations

    def close(self) -> None:
        """The block is over."""
        if self.exceeded:
            worst = max(self.exceeded, key=self.exceeded.__getitem__)
            warnings.warn(
                f"the budget was exceeded by {format_bytes(self.exceeded[worst])}: {worst} took more to work in, when "
                f"it first ran, than could be foretold",
                RecoupWarning,
                stacklevel=3,
            )
        if self.kept:
            warnings.warn(
                f"results of {', '.join(self.kept)} were kept, because they cannot be computed again exactly",
                RecoupWarning,
                stacklevel=3,
            )

    def __str__(self) -> str:
        spent = self.base_seconds + self.remat_seconds + self.search_seconds + self.bookkeeping_seconds
        followed = f"; {self.followed} steps followed a plan" if self.followed else ""
        return (
            f"peak {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} "
            f"(with nothing evicted: {format_bytes(self.wanted_bytes)}); {self.evictions} evictions, "
            f"{self.rematerializations} operators repeated; {spent:.3g} s: {self.base_seconds:.3g} in operators, "
            f"{self.remat_seconds:.3g} repeating them, {self.search_seconds:.3g} choosing what to evict, "
            f"{self.bookkeeping_seconds:.3g} keeping books{followed}"
        )
