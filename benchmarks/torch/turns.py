"""Contenders in processes of their own: they compile beside each other, and are measured one after the other.

cuDNN chooses its algorithms by their time when a process first runs them, and chooses badly while others run. So where
times count, each contender begins anew, alone, once all have left what they compiled on disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.torch.steps import Contender, Measured


@dataclass
class _Process:
    contender: Contender
    folder: Path
    limit: int | None
    """Bytes that the process may reserve on the device."""

    def __post_init__(self) -> None:
        one = self.contender
        self.folder.mkdir()
        command = [sys.executable, "-m", "benchmarks.torch", "contender", one.model, one.kind, "--mode", one.mode]
        command += ["--size", one.size, "--device", str(one.device), "--time-limit", str(one.time_limit)]
        command += ["--turn", str(self.folder)]
        environment = dict(os.environ)
        if self.limit is not None:
            command += ["--limit", str(self.limit)]
            environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        self._errors = (self.folder / "stderr").open("w+")
        self._running = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    @property
    def waits(self) -> bool:
        """Whether it is ready to be measured, or over."""
        return (self.folder / "ready").exists() or self._running.poll() is not None

    def leave(self) -> float | None:
        """Stop here; the seconds of its first step, if it came that far, and else a line that says why not."""
        ready = self.folder / "ready"
        self._running.kill()
        self._running.communicate()
        if ready.exists():
            return float(ready.read_text())
        one = self.contender
        print(f"{one.model:10} {one.kind} {one.mode}, beside the others: {self._problem()}", flush=True)
        return None

    def measured(self) -> Measured | str:
        """Give it its turn; what it found, or why it failed."""
        (self.folder / "go").touch()
        output, _ = self._running.communicate()
        if self._running.returncode == 0:
            return Measured(**json.loads(output.splitlines()[-1]))
        return self._problem()

    def _problem(self) -> str:
        self._errors.seek(0)
        return (self._errors.read().strip().splitlines() or ["no message"])[-1]


def alone(contenders: Sequence[Contender]) -> Iterator[tuple[Contender, Measured | str]]:
    """Each contender and what it took, with nothing else on the device, or why it failed."""
    compiled = list(dict.fromkeys(one for one in contenders if one.mode == "inductor"))
    with tempfile.TemporaryDirectory() as folder:
        first = {process.contender: process.leave() for process in _ready(compiled, Path(folder), None)}
    for one in contenders:
        with tempfile.TemporaryDirectory() as folder:
            [process] = _ready([one], Path(folder), None)
            found = process.measured()
        yield one, found if isinstance(found, str) else replace(found, cold_step_seconds=first.get(one))


def limited(contenders: Sequence[Contender], slack: float) -> Iterator[tuple[Contender, Measured | str]]:
    """The same in processes that may reserve no more than the budget and that share of it, with others waiting."""
    with tempfile.TemporaryDirectory() as folder:
        for process in _ready(contenders, Path(folder), slack):
            yield process.contender, process.measured()


def _ready(contenders: Sequence[Contender], folder: Path, slack: float | None) -> list[_Process]:
    """Started, and waiting for their turn."""
    started = []
    for number, one in enumerate(contenders):
        limit = int(int(one.kind.partition("=")[2]) * (1 + slack)) if slack is not None else None
        started.append(_Process(one, folder / str(number), limit))
    while not all(process.waits for process in started):
        time.sleep(0.1)
    return started


def wait_for_turn(folder: Path, first_step_seconds: float) -> None:
    """In a contender's process: say that it is ready, and wait until it may be measured."""
    written = folder / "written"
    written.write_text(str(first_step_seconds))
    written.rename(folder / "ready")
    while not (folder / "go").exists():
        time.sleep(0.05)
