"""``recoup dtr``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from recoup.cli.common import number, percent, print_json, print_rows
from recoup.online.heuristics import HEURISTICS, MEASURES
from recoup.units import format_bytes

if TYPE_CHECKING:
    from recoup.online.simulator import Deallocation

_EPILOG = """\b
Examples:
  recoup dtr step.log.gz --budget 0.5
  recoup dtr step.log --budget 2GiB --heuristic dtr-eq --limit 3 --json
  recoup dtr step.log --budget 0.5 --heuristic dtr --without staleness --without size

Exit codes: 0 if the run ended within the budget, 3 if it ran out of memory or thrashed, 2 on bad input.
"""


@click.command(epilog=_EPILOG)
@click.argument("log")
@click.option(
    "--budget", required=True, metavar="SIZE",
    help="Bytes with a unit (2GiB, 30B), or a fraction of the most bytes that the program itself holds at once.",
)  # fmt: skip
@click.option(
    "--heuristic", default="dtr", show_default=True, type=click.Choice(list(HEURISTICS)), metavar="NAME",
    help=f"What to evict: {', '.join(HEURISTICS)}.",
)  # fmt: skip
@click.option(
    "--without", multiple=True, type=click.Choice(MEASURES), metavar="MEASURE",
    help=f"Turn a measure of the heuristic off: {', '.join(MEASURES)}; several may be given.",
)  # fmt: skip
@click.option("--banish", "deallocation", flag_value="banish", help="What the program releases goes for good.")
@click.option("--no-eager", "deallocation", flag_value="none", help="What the program releases waits to be evicted.")
@click.option(
    "--limit", default=2.0, show_default=True,
    help="Stop when everything computed costs more than this multiple of computing it once.",
)  # fmt: skip
@click.option(
    "--small", default=0.0, metavar="SHARE", help="Ignore storages below this share of the average size (say 0.01)."
)
@click.option("--sample", is_flag=True, help="Look at a sample of the storages, about the square root of all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def dtr(
    log: str,
    budget: str,
    heuristic: str,
    without: tuple[str, ...],
    deallocation: Deallocation | None,
    limit: float,
    small: float,
    sample: bool,
    as_json: bool,
) -> None:
    """Simulate LOG, a record of a PyTorch program's operators, under a budget with DTR.

    Without --banish and --no-eager, what the program releases is evicted at once, and may be computed again.
    """
    from recoup.online.logs import read_log
    from recoup.online.simulation import simulate_log

    outcome = simulate_log(
        read_log(log),
        budget,
        heuristic,
        without=without,
        deallocation=deallocation or "eager",
        limit=limit,
        small=small,
        sample=sample,
    )
    if as_json:
        print_json(outcome.to_data())
    else:
        print_rows(
            [
                ("log", log),
                ("heuristic", outcome.heuristic),
                ("status", outcome.status + (f" ({outcome.message})" if outcome.message else "")),
                ("budget", "-" if outcome.budget_bytes is None else format_bytes(outcome.budget_bytes)),
                ("peak", format_bytes(outcome.peak_bytes)),
                ("cost", f"{number(outcome.total_cost)}   ({number(outcome.base_cost)} with nothing recomputed)"),
                ("overhead", percent(outcome.overhead)),
                ("rematerializations", f"{outcome.rematerializations}   ({number(outcome.remat_cost)} of the cost)"),
                ("evictions", str(outcome.evictions)),
                ("accesses", f"{outcome.accesses}   (storages looked at)"),
                ("time", f"{outcome.seconds:.2f} s"),
            ]
        )
    sys.exit(0 if outcome.status == "ok" else 3)
