"""What a user sees while a step is measured and planned: one line on the terminal, nothing in a log."""

from __future__ import annotations

import sys
from types import TracebackType

from recoup.planfile import Plan
from recoup.task import Progress
from recoup.units import format_bytes


class Reporter:
    """A status line on stderr; shown on a terminal unless ``verbose`` says otherwise."""

    def __init__(self, verbose: bool | None) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._shown = sys.stderr.isatty() if verbose is None else verbose
        self._status = self._console.status("capturing ...") if self._shown else None

    def __enter__(self) -> Reporter:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """Replace the line."""
        if self._status is not None:
            self._status.update(f"recoup: {text}")

    def measured(self, count: int, total: int) -> None:
        """``count`` of ``total`` distinct ops were measured."""
        filled = 20 * count // max(total, 1)
        self.say(f"measuring ops  [{'#' * filled}{'.' * (20 - filled)}]  {count}/{total}".replace("[", "\\["))

    def searched(self, state: Progress) -> None:
        """The planner has news."""
        best = "-" if state.incumbent is None else f"{1000 * state.incumbent:.4g} ms"
        bound = "-" if state.bound is None else f"{1000 * state.bound:.4g} ms"
        self.say(f"planning  {state.seconds:.0f} s  best {best}  bound {bound}")

    def planned(self, plan: Plan, plain_peak: int) -> None:
        """A line that stays: what was planned."""
        if self._shown:
            base = sum(op.time for op in plan.graph.ops)
            self._console.print(
                f"recoup: {format_bytes(plain_peak)} plain, planned {format_bytes(plan.peak_bytes)} for "
                f"{100 * (plan.cost / base - 1) if base else 0:.2f} % more time"
            )

    def tried(self, predicted: int, measured: int, seconds: float) -> None:
        """A line that stays: what a compiled step took."""
        if self._shown:
            self._console.print(
                f"recoup: compiled; peak {format_bytes(measured)} ({format_bytes(predicted)} predicted), "
                f"{1000 * seconds:.2f} ms"
            )
