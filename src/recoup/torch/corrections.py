"""By how much the prediction of a compiled step's peak is off, found by trying."""

from __future__ import annotations


class Corrections:
    """What to add to the prediction, so that the measured peak comes to lie just below the budget.

    Every plan is off by another amount, so that the error of one is a guess for the next, with a margin that doubles
    each time the peak was over the budget: it may lie where the prediction sees none. Where a guess leads out of what
    is known already, because more than this fits and less than that does not, the middle is tried.
    """

    def __init__(self) -> None:
        self._misses = 0
        self._refused: int | None = None
        self._too_low: int | None = None
        self._enough: int | None = None

    def refused(self, planned: int, correction: int, margin: float) -> int:
        """With ``correction`` there is no plan: the last plan was off by so much, another need not be."""
        self._refused = correction  # each below the one before, since no guess reaches what was refused
        return (planned + correction) // 2 if correction - planned >= margin else planned

    def next(self, planned: int, error: int, fits: bool, margin: int) -> int | None:
        """With ``planned``, the peak was ``error`` bytes above the prediction; None if nothing new is left to try."""
        if fits:
            self._enough = planned if self._enough is None else min(self._enough, planned)
        else:
            self._too_low = planned if self._too_low is None else max(self._too_low, planned)
            self._misses += 1
        guess = planned + error + (0 if fits else margin * 2 ** (self._misses - 1))
        if self._enough is None:
            return guess if self._refused is None or guess < self._refused else (planned + self._refused) // 2
        if self._too_low is None:
            return guess if self._enough - guess > margin else None
        if self._enough - self._too_low <= margin:
            return None
        return guess if self._too_low < guess < self._enough else (self._too_low + self._enough) // 2
