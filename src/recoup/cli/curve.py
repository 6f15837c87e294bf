"""``recoup curve``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from recoup.cli.common import percent, print_json, read_graph
from recoup.errors import RecoupError
from recoup.files import check_writable, write_text
from recoup.graph import Graph
from recoup.planners.registry import METHODS
from recoup.solution import Solution
from recoup.tradeoff import curve as run
from recoup.tradeoff import parse_budgets
from recoup.units import format_bytes

_EPILOG = """\b
Examples:
  recoup curve mobilenet:64 --budgets 0.3:1.0:0.1
  recoup curve graph.json --budgets 4GiB,5GiB,6GiB --method optimal --method ap-greedy -o curve.png -o curve.json
"""


@click.command(epilog=_EPILOG)
@click.argument("graph")
@click.option(
    "--budgets", default="0.2:1.0:0.05", show_default=True, metavar="FIRST:LAST:STEP",
    help="Fractions of the plain peak, or a list of budgets with commas.",
)  # fmt: skip
@click.option(
    "--method", "--methods", "methods", multiple=True, default=("optimal",), show_default=True, metavar="NAME",
    help="Planner; several may be given, with commas or one by one.",
)  # fmt: skip
@click.option("--time-limit", default=60.0, show_default=True, metavar="SECONDS", help="For each budget and method.")
@click.option("--gap", type=float, help="Stop when proven this close to optimal.  [default: as in 'recoup solve']")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("-o", "--output", "outputs", multiple=True, metavar="FILE", help="Write .json, or plot to .png or .svg.")
def curve(
    graph: str,
    budgets: str,
    methods: tuple[str, ...],
    time_limit: float,
    gap: float | None,
    seed: int,
    as_json: bool,
    outputs: tuple[str, ...],
) -> None:
    """Show what memory costs: solve GRAPH at many budgets, over all cores.

    Budgets below the feasible end are marked. Exit code 0 if any budget has a schedule, 3 if none has.
    """
    problem = read_graph(graph)
    for output in outputs:
        check_writable(output)
        if Path(output).suffix not in (".json", ".png", ".svg"):
            raise RecoupError(f"{output!r}: a curve is written as .json, .png or .svg")
    if any(Path(output).suffix != ".json" for output in outputs):
        _plotting()
    names = [name for part in methods for name in part.split(",")]
    quiet = as_json or not sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if not quiet:
            click.echo(f"\r\033[K{done} of {total} solved", err=True, nl=False)

    found = run(problem, parse_budgets(budgets), names, time_limit=time_limit, gap=gap, seed=seed, progress=progress)
    if not quiet:
        click.echo("\r\033[K", err=True, nl=False)
    data = _data(problem, found)
    if as_json:
        print_json(data)
    else:
        _print(found)
    for output in outputs:
        if Path(output).suffix == ".json":
            write_text(output, json.dumps(data) + "\n")
        else:
            _plot(problem, found, output)
    sys.exit(0 if any(s.schedule is not None for row in found.values() for s in row) else 3)


def _data(graph: Graph, found: dict[str, list[Solution]]) -> dict[str, Any]:
    points = [solution.to_data() for row in found.values() for solution in row]
    for point in points:
        del point["schedule"]
    return {"graph": graph.name, "fingerprint": graph.fingerprint, "time_unit": graph.time_unit, "points": points}


def _print(found: dict[str, list[Solution]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("budget", justify="right")
    table.add_column("of plain", justify="right")
    for name in found:
        table.add_column(f"{name}: overhead (gap)", justify="right")
    for row in zip(*found.values(), strict=False):
        budget = row[0].budget_bytes or 0
        share = percent(budget / row[0].base_peak_bytes) if row[0].base_peak_bytes else "-"
        cells = [s.status if s.cost is None else f"{percent(s.overhead)} ({percent(s.gap)})" for s in row]
        table.add_row(format_bytes(budget), share, *cells)
    Console(highlight=False).print(table)


def _plotting() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise RecoupError("plots need matplotlib: pip install matplotlib, or write .json") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _plot(graph: Graph, found: dict[str, list[Solution]], output: str) -> None:
    """Overhead against budget, one line a method; bounds dotted, budgets without a schedule marked on the axis."""
    pyplot = _plotting()
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for colour, (name, row) in enumerate(found.items()):
        gib = 2.0**30
        solved = [s for s in row if s.overhead is not None]
        missing = [s for s in row if s.overhead is None]
        x = [(s.budget_bytes or 0) / gib for s in solved]
        axes.plot(x, [100 * (s.overhead or 0) for s in solved], "o-", color=f"C{colour}", label=name, markersize=4)
        if METHODS[name].proves:
            bound = [100 * ((s.lower_bound or 0) / s.base_cost - 1) for s in solved]
            axes.plot(x, bound, ":", color=f"C{colour}", label=f"{name}: lower bound")
        if missing:
            where = [(s.budget_bytes or 0) / gib for s in missing]
            axes.plot(where, [0] * len(where), "x", color=f"C{colour}", label=f"{name}: no schedule", clip_on=False)
    axes.set_xlabel("budget (GiB)")
    axes.set_ylabel("overhead (%)")
    axes.set_ylim(bottom=0)
    axes.set_title(graph.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output)
    pyplot.close(figure)
