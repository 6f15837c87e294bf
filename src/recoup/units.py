"""Bytes and budgets as people write them."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from numbers import Integral, Real

from recoup.errors import BudgetError

_UNITS = {"b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_HELP = "write bytes with a unit, as in 6GiB, 500MB or 123B, or a fraction of the plain peak, as in 0.4"

Budget = int | float | str | None


def parse_bytes(text: str, hint: str = _HELP) -> int:
    """``'6GiB'``, ``'1.5 GB'``, ``'123B'`` to bytes; GiB is 2^30, GB is 10^9. ``hint`` is what to write instead."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]+)\s*", text)
    if match is None:
        raise BudgetError(f"{text!r} is not a budget: {hint}")
    number, unit = match.groups()
    if unit.lower() not in _UNITS:
        raise BudgetError(f"{text!r}: there is no unit {unit!r}: {hint}")
    count = int(Fraction(number) * _UNITS[unit.lower()])
    if count >= 2**62:
        raise BudgetError(f"{text!r} is more memory than there is")
    return count


def resolve_budget(budget: Budget, plain_peak: int, hint: str = _HELP) -> int | None:
    """A budget in bytes: integers are bytes, floats fractions of ``plain_peak``, strings either; None is no limit."""
    if budget is None:
        return None
    if isinstance(budget, str):
        text = budget.strip()
        if re.fullmatch(r"[0-9]*\.?[0-9]+|[0-9]+\.", text) is None:
            return parse_bytes(text, hint)
        return _share(Fraction(text), plain_peak, budget)
    if isinstance(budget, bool) or not isinstance(budget, Real):
        raise BudgetError(f"{budget!r} is not a budget: {hint}")
    if isinstance(budget, Integral):
        if not 0 <= budget < 2**62:
            raise BudgetError(f"a budget of {budget} bytes means nothing")
        return int(budget)
    if budget != budget or budget in (float("inf"), float("-inf")):
        raise BudgetError(f"{budget!r} is not a budget: {hint}")
    return _share(Fraction(repr(float(budget))), plain_peak, budget)


def _share(fraction: Fraction, plain_peak: int, given: object) -> int:
    if not 0 < fraction <= 1:
        raise BudgetError(f"{given!r}: a budget without a unit is a fraction between 0 and 1; {_HELP}")
    return int(fraction * plain_peak)


def format_bytes(count: int, up: bool = False) -> str:
    """Bytes for people: exact below 1 KiB, else three or four digits and a binary unit.

    ``up`` rounds up, for a budget that must work as it is printed.

    >>> format_bytes(2_310_500), format_bytes(2_310_500, up=True)
    ('2.203 MiB', '2.204 MiB')
    """
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 4)
    size = Fraction(count, 1024**power)
    digits = 10 ** max(0, 4 - len(str(int(size))))
    rounded = Fraction(math.ceil(size * digits), digits) if up else size
    return f"{float(rounded):.4g} {'KMGT'[power - 1]}iB"
