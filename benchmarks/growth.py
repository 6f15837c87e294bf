"""Theorem 3.1 of the DTR paper, measured: a linear network of N layers in 2 * ceil(sqrt(N)) takes O(N) operators.

python -m benchmarks.dtr growth -o growth.svg
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table

from recoup.online import heuristics
from recoup.online.programs import linear_network
from recoup.online.simulator import Simulator

HEURISTICS = ("e-star", "dtr")


@click.command()
@click.option("--longest", default=4096, show_default=True, help="Layers of the longest network.")
@click.option("-o", "--output", metavar="FILE", help="Also plot to this .svg or .png file.")
def growth(longest: int, output: str | None) -> None:
    """Print how many operators run in all, forward, backward and again, for networks of more and more layers."""
    lengths = [2**k for k in range(4, longest.bit_length()) if 2**k <= longest]
    totals = {name: [total(length, name) for length in lengths] for name in HEURISTICS}
    table = Table(box=None, pad_edge=False)
    table.add_column("layers", justify="right")
    table.add_column("room", justify="right")
    for name in HEURISTICS:
        table.add_column(f"{name}: operators", justify="right")
        table.add_column("per layer", justify="right")
    for i, length in enumerate(lengths):
        cells = [cell for row in totals.values() for cell in (f"{row[i]:.0f}", f"{row[i] / length:.3f}")]
        table.add_row(str(length), str(room(length)), *cells)
    Console(highlight=False, width=120).print(table)
    if output is not None:
        _plot(lengths, totals, output)


def room(length: int) -> int:
    """The budget of the theorem."""
    return 2 * math.ceil(math.sqrt(length))


def total(length: int, heuristic: str) -> float:
    """Operators run for a linear network of so many layers."""
    run = Simulator(room(length), heuristics.make(heuristic), "banish")
    linear_network(run, length)
    return run.total_cost


def _plot(lengths: Sequence[int], totals: dict[str, list[float]], output: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, row in totals.items():
        axes.plot(lengths, row, "o-", markersize=4, label=name)
    axes.plot(lengths, [2 * length for length in lengths], ":", color="0.5", label="nothing recomputed")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("layers N")
    axes.set_ylabel("operators run")
    axes.set_title("linear networks in $2\\lceil\\sqrt{N}\\,\\rceil$")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output)
    pyplot.close(figure)
