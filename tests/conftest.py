"""Random examples are new each time on a developer's machine, and the same each time in CI."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
