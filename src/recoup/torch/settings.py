"""What a user may ask of :func:`recoup.optimize`, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypedDict

from recoup.errors import BudgetError, PlanError, SettingError
from recoup.planfile import Plan
from recoup.planners import registry
from recoup.solving import check_arguments
from recoup.torch.store import Where
from recoup.units import Budget, parse_bytes, resolve_budget

Mode = Literal["inductor", "eager"]


class Options(TypedDict, total=False):
    """What :func:`recoup.optimize` and :func:`recoup.plan` take besides a budget."""

    compile: Mode | None
    planner: str
    time_limit: float | None
    gap: float | None
    cache: Where
    verbose: bool | None
    reserve: int | str


class RunOptions(Options, total=False):
    """What :func:`recoup.optimize` takes besides a budget."""

    plan: Plan | str | Path | None


_RESERVE = "give bytes, as in '500MiB'"


@dataclass(frozen=True)
class Settings:
    """The options of :func:`recoup.optimize`, as given there."""

    budget: Budget
    compile: Mode | None = None
    planner: str = "auto"
    time_limit: float | None = 30.0
    gap: float | None = None
    cache: Where = True
    verbose: bool | None = None
    reserve: int | str = 0
    plan: Plan | None = None
    estimate: bool = False
    """Whether a plan is for a device that is not here, so that nothing is measured, and nothing may run."""

    @staticmethod
    def of(budget: Budget = None, *, plan: Plan | str | Path | None = None, **options: Any) -> Settings:
        """As a user gives them: the plan may be a file, and brings its budget."""
        unknown = sorted(options.keys() - {one.name for one in fields(Settings)})
        if unknown:
            raise SettingError(
                f"there is no option {unknown[0]!r}: there are {', '.join(sorted(Options.__annotations__))}"
            )
        ready = _given(plan)
        if ready is not None and budget is None:
            budget = ready.budget_bytes if ready.budget_bytes is not None else ready.peak_bytes
        return Settings(budget, plan=ready, **options)

    def __post_init__(self) -> None:
        if self.budget is None:
            raise BudgetError(
                "a budget is needed: bytes with a unit (6GiB), a fraction of the plain peak (0.4), or auto"
            )
        if self.budget != "auto":
            resolve_budget(self.budget, 2**40)
        if self.compile not in (None, "inductor", "eager"):
            raise SettingError(f"compile={self.compile!r}: there are 'inductor' and 'eager'")
        if self.estimate and self.compile == "inductor":
            raise SettingError("estimate=True plans eager steps: a compiled one is tried out, and needs its device")
        registry.get(self.planner)
        for name, number in (("time_limit", self.time_limit), ("gap", self.gap)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, Real)):
                raise SettingError(f"{name}={number!r} is not a number")
        check_arguments(self.time_limit, 0, self.gap or 0.0)
        if not isinstance(self.cache, bool | str | Path):
            raise SettingError(f"cache={self.cache!r}: give a folder, True for the default one, or False for none")
        is_bytes = isinstance(self.reserve, str | int) and not isinstance(self.reserve, bool)
        if not is_bytes or self.reserve_bytes < 0:
            raise SettingError(f"reserve={self.reserve!r}: {_RESERVE}")

    @property
    def reserve_bytes(self) -> int:
        """Bytes to leave for what will be resident later."""
        return parse_bytes(self.reserve, _RESERVE) if isinstance(self.reserve, str) else self.reserve


def _given(plan: Plan | str | Path | None) -> Plan | None:
    if not isinstance(plan, Plan | str | Path | None):
        raise PlanError(f"plan={plan!r} is neither a plan, as recoup.plan makes them, nor the path of its file")
    return Plan.load(plan) if isinstance(plan, str | Path) else plan
