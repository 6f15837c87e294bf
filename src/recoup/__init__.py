"""recoup: train a model inside a memory budget, with plans proven close to optimal.

Names load when first used, so that ``import recoup`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recoup.batch import BatchSize, max_batch
    from recoup.builder import GraphBuilder
    from recoup.errors import (
        BudgetError,
        CaptureError,
        GraphError,
        LogError,
        MethodError,
        PlanError,
        RecoupError,
        RecoupWarning,
        ScheduleError,
        SettingError,
    )
    from recoup.graph import Graph, Implementation, Op, Value
    from recoup.judge import Simulation, simulate
    from recoup.online.record import record
    from recoup.online.runtime import dtr
    from recoup.planfile import Plan
    from recoup.schedule import Schedule
    from recoup.solution import Solution
    from recoup.solving import solve
    from recoup.task import Progress
    from recoup.torch.optimizing import optimize, plan, plans
    from recoup.tradeoff import curve

__version__ = "0.1.0"

_HOME = {
    "batch": ("BatchSize", "max_batch"),
    "builder": ("GraphBuilder",),
    "errors": (
        "BudgetError",
        "CaptureError",
        "GraphError",
        "LogError",
        "MethodError",
        "PlanError",
        "RecoupError",
        "RecoupWarning",
        "ScheduleError",
        "SettingError",
    ),
    "graph": ("Graph", "Implementation", "Op", "Value"),
    "judge": ("Simulation", "simulate"),
    "online.record": ("record",),
    "online.runtime": ("dtr",),
    "planfile": ("Plan",),
    "schedule": ("Schedule",),
    "solution": ("Solution",),
    "solving": ("solve",),
    "task": ("Progress",),
    "torch.optimizing": ("optimize", "plan", "plans"),
    "tradeoff": ("curve",),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "BatchSize",
    "BudgetError",
    "CaptureError",
    "Graph",
    "GraphBuilder",
    "GraphError",
    "Implementation",
    "LogError",
    "MethodError",
    "Op",
    "Plan",
    "PlanError",
    "Progress",
    "RecoupError",
    "RecoupWarning",
    "Schedule",
    "ScheduleError",
    "SettingError",
    "Simulation",
    "Solution",
    "Value",
    "curve",
    "dtr",
    "max_batch",
    "optimize",
    "plan",
    "plans",
    "record",
    "simulate",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'recoup' has no attribute {name!r}")
    return getattr(import_module(f"recoup.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
