"""``recoup solve``."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from recoup import solvers
from recoup.cli.common import number, percent, print_json, print_rows, read_graph
from recoup.files import check_writable
from recoup.planfile import Plan
from recoup.planners.registry import METHODS
from recoup.solution import Solution
from recoup.solving import solve as run
from recoup.task import Progress
from recoup.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

_EPILOG = """\b
Examples:
  recoup solve vgg16:64 --budget 0.9
  recoup solve graph.json --budget 5GiB --time-limit 300 -o graph.plan.json
  recoup solve chain:8 --budget 4B --json

Exit codes: 0 with a schedule, 3 if there is none (infeasible or unknown), 2 on bad input.
Ctrl-C stops the search and prints the best schedule so far.
"""


@click.command(epilog=_EPILOG)
@click.argument("graph")
@click.option(
    "--budget",
    required=True,
    metavar="SIZE",
    help="Memory the step may use, resident part included: bytes with a unit (5GiB, 800MB, 123B), or a fraction of the "
    "peak that the step has when nothing is recomputed (0.4).",
)
@click.option(
    "--method", default="auto", show_default=True, type=click.Choice(["auto", *METHODS]), metavar="NAME",
    help="Planner; 'recoup methods' lists them, 'auto' is 'optimal'.",
)  # fmt: skip
@click.option("--time-limit", default=60.0, show_default=True, metavar="SECONDS", help="Search no longer.")
@click.option(
    "--gap", type=float,
    help="Stop when proven this close to optimal (0.01 is 1 %).  [default: 0.005 for 'optimal', else 0]",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Same seed, same answer, unless the time limit cuts it off.")
@click.option("--solver", default="highs", show_default=True, type=click.Choice(solvers.NAMES))
@click.option("--reorder", is_flag=True, help="Also look for a better order of first runs, in the time that is left.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("-o", "--output", metavar="PLAN", help="Write the plan (graph, schedule, prediction) to this file.")
def solve(
    graph: str,
    budget: str,
    method: str,
    time_limit: float,
    gap: float | None,
    seed: int,
    solver: str,
    reorder: bool,
    as_json: bool,
    output: str | None,
) -> None:
    """Find a schedule for GRAPH that stays within a budget and costs as little as possible.

    GRAPH is a recoup-graph file, or a built-in graph such as vgg16, resnet50:32 (batch 32) or chain:8.
    """
    problem = read_graph(graph)
    if output is not None:
        check_writable(output)
    with _live_line(hidden=as_json) as listen:
        solution = run(
            problem,
            budget,
            method,
            time_limit=time_limit,
            gap=gap,
            seed=seed,
            solver=solver,
            reorder=reorder,
            progress=listen,
        )
    if as_json:
        print_json(solution.to_data())
    else:
        _print(solution, output)
    if output is not None and solution.schedule is not None:
        Plan.of(solution).save(output)
    sys.exit(0 if solution.schedule is not None else 3)


@contextmanager
def _live_line(hidden: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Bound and incumbent on one line of the terminal while the planner works; nothing where nobody looks."""
    if hidden or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    lock = threading.Lock()
    with Console(stderr=True, highlight=False).status("searching ...") as status:

        def listen(state: Progress) -> None:
            gap = None
            if state.bound is not None and state.incumbent:
                gap = max(0.0, 1 - state.bound / state.incumbent)
            line = f"{state.method}: {state.seconds:.0f} s   best {number(state.incumbent)}"
            line += f"   bound {number(state.bound)}   gap {percent(gap)}"
            line += f"   cuts {state.cuts}" if state.cuts is not None else ""
            with lock:
                status.update(line)

        yield listen


def _print(solution: Solution, output: str | None) -> None:
    unit = solution.graph.time_unit
    budget = "none" if solution.budget_bytes is None else format_bytes(solution.budget_bytes)
    proof = {
        "any": "for every schedule with this first-run order",
        "stage-once": "for schedules that run each op at most once per stage",
    }[solution.scope]
    rows = [
        ("graph", f"{solution.graph.name or '(no name)'}, {len(solution.graph.ops)} ops"),
        ("method", solution.method),
        ("status", solution.status + (f" ({solution.why()})" if solution.why() else "")),
        ("budget", f"{budget}   ({format_bytes(solution.base_peak_bytes)} with nothing recomputed)"),
    ]
    if solution.schedule is not None and solution.peak_bytes is not None:
        again = len(solution.schedule) - sum(1 for op in solution.graph.ops if not op.optional)
        rows += [
            ("peak", format_bytes(solution.peak_bytes)),
            ("cost", f"{number(solution.cost)} {unit}   ({number(solution.base_cost)} with nothing recomputed)"),
            ("overhead", f"{percent(solution.overhead)}   ({again} of {len(solution.schedule)} runs are repeats)"),
        ]
    if solution.lower_bound is not None:
        gap = f"   gap {percent(solution.gap)}" if solution.gap is not None else ""
        rows.append(("lower bound", f"{number(solution.lower_bound)} {unit}{gap}   {proof}"))
    rows.append(("time", f"{solution.seconds:.2f} s"))
    if output is not None and solution.schedule is not None:
        rows.append(("plan", output))
    print_rows(rows)
