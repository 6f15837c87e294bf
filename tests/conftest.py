"""Random examples are new each time on a developer's machine, and the same each time in CI."""

import os

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked ``full`` runs only when asked for by that name."""
    if "full" not in config.option.markexpr:
        left = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if item not in set(left)]
        config.hook.pytest_deselected(items=left)
