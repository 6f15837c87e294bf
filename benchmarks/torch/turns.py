"""Contenders in processes of their own: they compile beside each other, and are measured one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

    def measured(self) -> Measured | str:
        """Give it its turn; what it found, or why it failed."""
        (self.folder / "go").touch()
        output, _ = self._running.communicate()
        if self._running.returncode == 0:
            return Measured(**json.loads(output.splitlines()[-1]))
        self._errors.seek(0)
        return (self._errors.read().strip().splitlines() or ["no message"])[-1]


def in_turns(contenders: Sequence[Contender], slack: float | None = None) -> Iterator[tuple[Contender, Measured | str]]:
    """Each contender and what it took, or why it failed.

    With ``slack``, a process may reserve no more than its budget and that share of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for number, one in enumerate(contenders):
            limit = int(int(one.kind.partition("=")[2]) * (1 + slack)) if slack is not None else None
            started.append(_Process(one, Path(folder) / str(number), limit))
        while not all(process.waits for process in started):
            time.sleep(0.1)
        for process in started:
            yield process.contender, process.measured()


def wait_for_turn(folder: Path) -> None:
    """In a contender's process: say that it is ready, and wait until it may be measured."""
    (folder / "ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
