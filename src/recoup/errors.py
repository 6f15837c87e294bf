"""Every error and warning a user can meet. Each message says what was wrong, where, and what to do about it."""


class RecoupError(Exception):
    """Base of all errors raised on purpose."""


class GraphError(RecoupError, ValueError):
    """The graph is not a valid training step; the message names the op or value."""


class ScheduleError(RecoupError, ValueError):
    """The schedule cannot be executed; the message names the step."""


class PlanError(RecoupError, ValueError):
    """A plan file is broken, or belongs to another graph."""


class BudgetError(RecoupError, ValueError):
    """A budget that means nothing, or that nothing fits in; the message names one that works, if it was found."""


class SettingError(RecoupError, ValueError):
    """A time limit, gap, seed or size that means nothing."""


class MethodError(RecoupError, ValueError):
    """No planner or solver has that name."""


class CaptureError(RecoupError, RuntimeError):
    """A model cannot be captured; the message says where capturing stopped."""


class LogError(RecoupError, ValueError):
    """A log of operators is broken; the message says in which line."""


class RecoupWarning(UserWarning):
    """Something a user should know: a graph break, a step traced for every number, a budget that DTR exceeded."""
