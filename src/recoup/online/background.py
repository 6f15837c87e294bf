"""A planner in a process of its own, so that the program that waits for its plan is not held up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from recoup.errors import RecoupError
from recoup.graph import Graph
from recoup.schedule import Schedule


class Planning:
    """``recoup solve`` on a graph, started at once."""

    def __init__(self, graph: Graph, budget: int, seconds: float, gap: float) -> None:
        self.budget = budget
        self.seconds = seconds
        self.graph = graph
        self._folder = Path(tempfile.mkdtemp(prefix="recoup-"))
        path, answer = self._folder / "graph.json", self._folder / "answer.json"
        graph.save(path)
        self._answer = answer
        command = [sys.executable, "-P", "-m", "recoup", "solve", str(path), "--json", "--budget", f"{budget}B"]
        command += ["--time-limit", str(seconds), "--gap", str(gap)]
        environment = dict(
            os.environ, PYTHONPATH=os.pathsep.join(one for one in sys.path if one and isinstance(one, str))
        )
        with answer.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL, env=environment
            )

    @property
    def done(self) -> bool:
        """Whether there is an answer."""
        return self._process.poll() is not None

    def schedule(self) -> Schedule | None:
        """The answer: a schedule within the budget, or None if there is none."""
        try:
            steps = json.loads(self._answer.read_bytes())["schedule"]
            return None if steps is None else Schedule.of(self.graph, steps)
        except (OSError, ValueError, KeyError, TypeError, RecoupError):  # it failed, or was stopped, or cleaned away
            return None

    def stop(self) -> None:
        """Nobody waits for the answer any more."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
