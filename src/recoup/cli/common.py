"""What several commands share: reading a graph, and printing tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from recoup.errors import RecoupError
from recoup.generators import named, names
from recoup.graph import Graph
from recoup.planfile import Plan, load_graph_or_plan


def read(source: str) -> Graph | Plan:
    """A graph or a plan from a file, or a built-in graph by name."""
    try:
        if Path(source).exists():
            return load_graph_or_plan(source)
    except OSError as problem:
        raise RecoupError(f"cannot read {source[:60]!r}: {problem.strerror}") from problem
    graph = named(source)
    if graph is None:
        raise RecoupError(f"there is no file {source!r}, and no built-in graph of that name ({', '.join(names())})")
    return graph


def read_graph(source: str) -> Graph:
    """The graph of a file (a plan's own graph if it is a plan), or a built-in one."""
    found = read(source)
    return found.graph if isinstance(found, Plan) else found


def print_json(data: Any) -> None:
    """One object and nothing else."""
    click.echo(json.dumps(data, allow_nan=False))


def print_rows(rows: list[tuple[str, str]]) -> None:
    """Two columns: what, and how much."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    Console(highlight=False).print(table)


def percent(share: float | None) -> str:
    """A share as people read it."""
    return "-" if share is None else f"{100 * share:.4g} %"


def number(value: float | None) -> str:
    """A cost: all digits of an integer, six of anything else."""
    return "-" if value is None else (f"{value:,}" if isinstance(value, int) else f"{value:,.6g}")
