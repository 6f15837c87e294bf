"""Every method on a set of graphs under one time limit: cost, peak, gap and seconds, side by side.

    python -m benchmarks.planners                                   # built-in networks at half of their plain peak
    python -m benchmarks.planners graph.json --budgets 5GiB,4GiB --methods optimal,rounding -o results.json

A ratio is a method's cost over the cheapest schedule that any of them found for that graph and budget.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from recoup import Graph, Solution, solve
from recoup.cli.common import number, percent, read_graph
from recoup.planners.registry import METHODS
from recoup.units import format_bytes

GRAPHS = ("vgg19:64", "mobilenet:64", "unet:8", "resnet50:64", "densenet161:64", "transformer:24")
SKIPPED = ("checkmate-unpartitioned", "lp", "min-memory")


@click.command()
@click.argument("graphs", nargs=-1)
@click.option("--budgets", default="0.5", show_default=True, help="With commas: fractions of the plain peak, or sizes.")
@click.option("--methods", default=",".join(m for m in METHODS if m not in SKIPPED), help="With commas.")
@click.option("--time-limit", default=30.0, show_default=True, help="Seconds per method, graph and budget.")
@click.option("--gap", type=float, help="Stop when proven this close to optimal.  [default: each method's own]")
@click.option("-o", "--output", help="Also write everything to this JSON file.")
def main(
    graphs: tuple[str, ...], budgets: str, methods: str, time_limit: float, gap: float | None, output: str | None
) -> None:
    """Print a table per graph and budget."""
    console = Console(highlight=False, width=120)
    records = []
    for name in graphs or GRAPHS:
        graph = read_graph(name)
        for budget in budgets.split(","):
            answers = []
            for method in methods.split(","):
                with console.status(f"{name}: {method} in {budget}"):
                    answers.append(solve(graph, budget, method, time_limit=time_limit, gap=gap))
            console.print(_table(graph, answers))
            console.print()
            records += [_record(graph, solution) for solution in answers]
    console.print(f"{machine.describe()}; {time_limit:g} s per method, graph and budget")
    if output is not None:
        Path(output).write_text(json.dumps({"machine": machine.describe(), "results": records}, indent=1) + "\n")


def _record(graph: Graph, solution: Solution) -> dict[str, object]:
    data = {"graph": graph.name, "ops": len(graph.ops)} | solution.to_data()
    del data["schedule"]
    return data


def _table(graph: Graph, answers: list[Solution]) -> Table:
    costs = [solution.cost for solution in answers if solution.cost is not None]
    first = answers[0]
    title = f"{graph.name}, {len(graph.ops)} ops, {format_bytes(first.budget_bytes or 0)} of "
    table = Table(title=title + format_bytes(first.base_peak_bytes), box=None, title_justify="left")
    table.add_column("method")
    for column in ("status", "cost", "overhead", "ratio", "peak", "gap", "seconds"):
        table.add_column(column, justify="right")
    for s in answers:
        ratio = "-" if s.cost is None else f"{s.cost / min(costs):.4f}" if min(costs) else "1"
        peak = "-" if s.peak_bytes is None else format_bytes(s.peak_bytes)
        cells = (s.status, number(s.cost), percent(s.overhead), ratio, peak, percent(s.gap), f"{s.seconds:.1f}")
        table.add_row(s.method, *cells)
    return table


if __name__ == "__main__":
    main()
