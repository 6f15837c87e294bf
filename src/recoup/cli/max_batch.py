"""``recoup max-batch``."""

from __future__ import annotations

import re
import sys

import click

from recoup.batch import BatchSize
from recoup.batch import max_batch as run
from recoup.cli.common import number, print_json, read_graph
from recoup.errors import BudgetError
from recoup.planners.registry import METHODS
from recoup.units import format_bytes, parse_bytes

_EPILOG = """\b
Example, a column of the paper's Figure 6:
  recoup max-batch mobilenet --budget 16GB
"""


@click.command("max-batch", epilog=_EPILOG)
@click.argument("graph")
@click.option("--budget", required=True, metavar="SIZE", help="Memory the step may use, as in 16GiB.")
@click.option(
    "--method", "chosen", multiple=True, type=click.Choice([m for m in METHODS if m != "lp"]), metavar="NAME",
    help="Planner; may be given several times. Default: all that search quickly, and checkmate.",
)  # fmt: skip
@click.option(
    "--max-extra", default=1.0, show_default=True, metavar="PASSES",
    help="How many extra forward passes the recomputation may cost (equation 10).",
)  # fmt: skip
@click.option("--time-limit", default=60.0, show_default=True, metavar="SECONDS", help="For each method.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def max_batch(
    graph: str, budget: str, chosen: tuple[str, ...], max_extra: float, time_limit: float, seed: int, as_json: bool
) -> None:
    """Find the largest batch of GRAPH that fits a budget, for each method.

    GRAPH is taken at its own batch size; the answer is a multiple of it. Exit code 0 if a batch fits, 3 if none does.
    """
    problem = read_graph(graph)
    if re.fullmatch(r"[0-9.]+", budget):
        raise BudgetError(f"{budget!r}: a maximum batch needs a budget in bytes, as in 16GiB")
    limit = parse_bytes(budget)
    skipped = ("lp", "checkmate-unpartitioned", "min-memory", "recompute-forward")
    results = []
    for method in chosen or [name for name in METHODS if name not in skipped]:
        if not as_json and sys.stderr.isatty():
            click.echo(f"\r\033[K{method} ...", err=True, nl=False)
        results.append(run(problem, limit, method, max_extra=max_extra, time_limit=time_limit, seed=seed))
        if results[-1].interrupted:
            break
    if not as_json and sys.stderr.isatty():
        click.echo("\r\033[K", err=True, nl=False)
    if as_json:
        print_json({"budget_bytes": limit, "max_extra": max_extra, "results": [_data(result) for result in results]})
    else:
        _print(results, limit)
    sys.exit(0 if any(result.batch for result in results) else 3)


def _data(result: BatchSize) -> dict[str, object]:
    return {
        "method": result.method,
        "batch": result.batch,
        "upper_bound": result.upper_bound,
        "scope": result.scope,
        "cost": result.cost,
        "cost_limit": result.cost_limit,
        "seconds": round(result.seconds, 3),
        "message": result.message,
        "schedule": None if result.schedule is None else result.schedule.steps(),
    }


def _print(results: list[BatchSize], limit: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    best = max([result.batch for result in results], default=0)
    table = Table(box=None, pad_edge=False, title=f"largest batch in {format_bytes(limit)}", title_justify="left")
    table.add_column("method", style="bold", no_wrap=True)
    for name in ("batch", "at most", "cost", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for result in results:
        bar = result.message or "#" * round(20 * result.batch / max(best, 1))
        cells = (number(result.batch), number(result.upper_bound), number(result.cost), f"{result.seconds:.1f}")
        table.add_row(result.method, *cells, Text(bar))
    Console(highlight=False).print(table)
