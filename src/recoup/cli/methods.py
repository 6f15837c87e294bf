"""``recoup methods``."""

from __future__ import annotations

import click

from recoup.planners.registry import METHODS


@click.command()
def methods() -> None:
    """List the planners, with their place in the Checkmate paper."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("method", style="bold", no_wrap=True)
    table.add_column("paper", no_wrap=True)
    table.add_column("proves", no_wrap=True)
    table.add_column("what it does")
    for method in METHODS.values():
        table.add_row(method.name, method.paper, "yes" if method.proves else "", method.title)
    Console(highlight=False).print(table)
