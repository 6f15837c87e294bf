"""``torch.compile(model, backend="recoup", options={"budget": "6GiB"})``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from recoup.errors import BudgetError, SettingError
from recoup.torch.part import Part
from recoup.torch.session import Session
from recoup.torch.settings import Settings


def recoup(module: fx.GraphModule, _inputs: Any, **options: Any) -> Callable[..., Any]:
    """What PyTorch calls with each captured part; the options are those of :func:`recoup.optimize`.

    Each part is planned by itself, when it first runs, for what is resident then.
    """
    options = dict(options.pop("options", None) or {}) | options
    if "budget" not in options and "plan" not in options:
        raise BudgetError("backend='recoup' needs a budget: torch.compile(..., options={'budget': '6GiB'})")
    if "estimate" in options:
        raise SettingError("estimate= is for recoup.plan: what it makes is not for running")
    session = Session(Settings.of(**options))
    part = Part(session, module)
    session.parts.append(part)

    def planned(*args: Any) -> Any:
        session.begin()
        return part(*args)

    return planned
