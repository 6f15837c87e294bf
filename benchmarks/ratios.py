"""Approximation ratios of every method to the optimum: a table of the kind of the Checkmate paper's Table 2.

    python -m benchmarks.ratios                       # VGG16, VGG19, FCN8 and U-Net, five budgets each
    python -m benchmarks.ratios mobilenet --time-limit 600 -o ratios.json

Budgets are spaced evenly between the smallest any schedule needs and what the plain step needs. Ratios are geometric
means over the budgets at which the method found a schedule, of its cost over the cheapest that any found; a network is
marked where neither the integer program nor the default planner proved that one optimal at every budget.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from recoup import Graph, Schedule, Solution, simulate, solve
from recoup.cli.common import percent, read_graph
from recoup.planners.floor import memory_floor
from recoup.units import format_bytes

METHODS = (
    "optimal",
    "checkmate",
    "rounding",
    "ap-greedy",
    "linearized-greedy",
    "chen-greedy",
    "griewank",
    "ap-sqrt",
    "linearized-sqrt",
    "chen-sqrt",
    "checkpoint-last",
)
NETWORKS = ("vgg16", "vgg19", "fcn8", "unet")


@click.command()
@click.argument("graphs", nargs=-1)
@click.option("--budgets", default=5, show_default=True, help="How many budgets per network.")
@click.option("--time-limit", default=120.0, show_default=True, help="Seconds per method and budget.")
@click.option("-o", "--output", help="Also write everything to this JSON file.")
def main(graphs: tuple[str, ...], budgets: int, time_limit: float, output: str | None) -> None:
    """Print costs at each budget, then approximation ratios."""
    console = Console(highlight=False, width=150)
    ratios: dict[str, dict[str, str]] = {}
    records = []
    for name in graphs or NETWORKS:
        graph = read_graph(name)
        answers = []
        for budget in _spread(graph, budgets):
            row = {}
            for method in METHODS:
                with console.status(f"{name}: {method} in {format_bytes(budget)}"):
                    row[method] = solve(graph, budget, method, time_limit=time_limit, gap=0)
            answers.append(row)
            records += [{"graph": graph.name} | _record(solution) for solution in row.values()]
        console.print(_costs(graph, answers))
        console.print()
        ratios[graph.name] = _ratios(answers)
    console.print(_summary(ratios))
    console.print(f"{machine.describe()}; {time_limit:g} s per method and budget")
    if output is not None:
        Path(output).write_text(json.dumps({"machine": machine.describe(), "results": records}, indent=1) + "\n")


def _spread(graph: Graph, count: int) -> list[int]:
    low = memory_floor(graph).bytes
    high = simulate(graph, Schedule.default(graph)).peak_bytes
    return [low + (high - low) * k // count for k in range(count - 1, -1, -1)]


def _record(solution: Solution) -> dict[str, object]:
    data = solution.to_data()
    del data["schedule"]
    return data


def _costs(graph: Graph, answers: list[dict[str, Solution]]) -> Table:
    table = Table(title=f"{graph.name}: overhead at each budget (* proven optimal, - nothing found)", box=None)
    table.add_column("budget", justify="right")
    for method in METHODS:
        table.add_column(method, justify="right")
    table.add_column("bound", justify="right")
    for row in answers:
        cells = [percent(s.overhead) + ("*" if s.status == "optimal" else "") for s in row.values()]
        exact = row["checkmate"]
        bound = max(s.lower_bound or 0 for s in row.values()) / exact.base_cost - 1
        table.add_row(format_bytes(exact.budget_bytes or 0), *cells, percent(bound))
    return table


def _ratios(answers: list[dict[str, Solution]]) -> dict[str, str]:
    logs: dict[str, list[float]] = defaultdict(list)
    proven = True
    for row in answers:
        costs = [solution.cost for solution in row.values() if solution.cost is not None]
        if not costs:
            continue
        proven &= "optimal" in (row["checkmate"].status, row["optimal"].status)
        for method, solution in row.items():
            if solution.cost is not None:
                logs[method].append(math.log(solution.cost / min(costs)))
    mark = "" if proven else " (not all proven)"
    means = {m: f"{math.exp(sum(x) / len(x)):.3f}x ({len(x)}/{len(answers)})" for m, x in logs.items()}
    return means | {"": mark}


def _summary(ratios: dict[str, dict[str, str]]) -> Table:
    table = Table(title="cost over the optimum, geometric mean (budgets solved / tried)", box=None)
    table.add_column("method")
    for name, found in ratios.items():
        table.add_column(name + found.get("", ""), justify="right")
    for method in METHODS:
        table.add_row(method, *(found.get(method, "-") for found in ratios.values()))
    return table


if __name__ == "__main__":
    main()
