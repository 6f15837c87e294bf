"""recoup: train a model inside a memory budget, with plans proven close to optimal."""

from recoup.batch import BatchSize, max_batch
from recoup.builder import GraphBuilder
from recoup.errors import (
    BudgetError,
    GraphError,
    MethodError,
    PlanError,
    RecoupError,
    ScheduleError,
    SettingError,
)
from recoup.graph import Graph, Implementation, Op, Value
from recoup.judge import Simulation, simulate
from recoup.planfile import Plan
from recoup.schedule import Schedule
from recoup.solution import Solution
from recoup.solving import solve
from recoup.task import Progress
from recoup.tradeoff import curve

__version__ = "0.1.0"

__all__ = [
    "BatchSize",
    "BudgetError",
    "Graph",
    "GraphBuilder",
    "GraphError",
    "Implementation",
    "MethodError",
    "Op",
    "Plan",
    "PlanError",
    "Progress",
    "RecoupError",
    "Schedule",
    "ScheduleError",
    "SettingError",
    "Simulation",
    "Solution",
    "Value",
    "curve",
    "max_batch",
    "simulate",
    "solve",
]
