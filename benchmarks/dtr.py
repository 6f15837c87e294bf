"""DTR's simulator beside a straightforward one: seconds of each for the same log, and the ratio.

    python -m benchmarks.dtr step.log.gz other.log --budget 0.5 --heuristics dtr,dtr-eq
    python -m benchmarks.dtr                                # a synthetic program
    python -m benchmarks.dtr growth -o growth.svg           # another one: how cost grows with length

Both run the log that was read, in as many bytes. Totals are compared.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.growth import growth
from benchmarks.objects import MEASURES, ObjectRun
from recoup.online import logs
from recoup.online.replay import replay
from recoup.online.simulation import baseline_peak, simulate_log
from recoup.online.simulator import OutOfMemory, Thrashing
from recoup.units import resolve_budget

LENGTH = 1000  # layers of the synthetic program


class _SpeedUnlessNamed(click.Group):
    """A group whose first command need not be named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if named else ["speed", *args])


@click.group(cls=_SpeedUnlessNamed)
def main() -> None:
    """Measure DTR's simulator: speed, unless told otherwise, or growth."""


main.add_command(growth)


@main.command()
@click.argument("paths", nargs=-1, metavar="[LOG]...")
@click.option("--budget", default=0.5, show_default=True, help="A fraction of what the program itself holds.")
@click.option("--heuristics", default="dtr,dtr-eq", show_default=True, help=f"With commas: {', '.join(MEASURES)}.")
@click.option("--limit", default=2.0, show_default=True, help="Of the cost, over that of computing everything once.")
@click.option("--rounds", default=3, show_default=True, help="Runs of each, in turns; the best counts.")
def speed(paths: tuple[str, ...], budget: float, heuristics: str, limit: float, rounds: int) -> None:
    """Print a line per log and heuristic."""
    table = Table(box=None, pad_edge=False)
    table.add_column("log")
    table.add_column("heuristic")
    for column in ("operators", "overhead", "objects", "recoup", "ratio"):
        table.add_column(column, justify="right")
    programs = {Path(path).name: logs.read_log(path) for path in paths} or {"synthetic": skipping(LENGTH)}
    for name, log in programs.items():
        for heuristic in heuristics.split(","):
            with _deep_recursion():
                slow, fast, overhead = _measure(log, budget, heuristic, limit, rounds)
            operators = sum(isinstance(item, logs.Call | logs.Mutate) for item in log)
            times = (f"{slow:.3f} s", f"{fast:.3f} s", f"{slow / fast:.1f}x")
            table.add_row(name, heuristic, str(operators), overhead, *times)
    console = Console(highlight=False, width=120)
    console.print(table)
    console.print(f"{machine.describe()}; best of {rounds}; in {budget:g} of the program's own peak")


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """The straightforward simulator brings parents back by recursion."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _measure(
    log: Sequence[logs.Instruction], budget: float, heuristic: str, limit: float, rounds: int
) -> tuple[float, float, str]:
    slow, fast = [], []
    room = resolve_budget(budget, baseline_peak(log))
    for _ in range(rounds):
        run = ObjectRun(room, heuristic, limit=limit)
        began = time.perf_counter()
        with suppress(OutOfMemory, Thrashing):
            replay(log, run)
        middle = time.perf_counter()
        outcome = simulate_log(log, room, heuristic, limit=limit)
        slow.append(middle - began)
        fast.append(time.perf_counter() - middle)
    if (run.total_cost, run.evictions) != (outcome.total_cost, outcome.evictions):
        raise click.ClickException(f"they differ with {heuristic}: {run.total_cost} and {outcome.total_cost}")
    overhead = outcome.status if outcome.overhead is None else f"{100 * outcome.overhead:.1f} %"
    return min(slow), min(fast), overhead


def skipping(length: int) -> list[logs.Instruction]:
    """A synthetic step: layers that read the one before and one further back, and a backward that reads them again."""
    log: list[logs.Instruction] = [logs.Constant("y0", 64)]
    for i in range(1, length + 1):
        back = max(0, i - 2 - i % 7)
        log.append(logs.Call("layer", (f"y{i - 1}", f"y{back}"), (f"y{i}",), (64 + i % 5 * 16,), (-1,), 5 + i % 11))
    log.append(logs.Call("loss", (f"y{length}",), (f"g{length}",), (64,), (-1,), 5))
    for i in range(length, 0, -1):
        log.append(logs.Call("back", (f"g{i}", f"y{i}", f"y{i - 1}"), (f"g{i - 1}",), (64,), (-1,), 10 + i % 11))
        log += [logs.Release(f"g{i}"), logs.Release(f"y{i}")]
    return log


if __name__ == "__main__":
    main()
