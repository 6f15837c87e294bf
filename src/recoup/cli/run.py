"""``recoup run``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from recoup.cli.common import print_json
from recoup.cli.source import (
    compile_option,
    device_option,
    json_option,
    need_torch,
    pick_device,
    pick_mode,
    quiet_stdout,
    read_workload,
)
from recoup.errors import BudgetError
from recoup.solving import check_arguments
from recoup.units import format_bytes

if TYPE_CHECKING:
    import torch

    from recoup.torch.compare import Comparison
    from recoup.torch.settings import Mode
    from recoup.torch.workload import Workload

_EPILOG = """\b
Examples:
  recoup run resnet50:32 --budget 0.5
  recoup run training.model:make --budget 6GiB --device cuda
  recoup run train.py:make --budget 0.4 --compile inductor --json

\b
where train.py has, for example,
  def make():
      x, y = torch.randn(16, 3, 224, 224), torch.randint(1000, (16,))
      return MyModel(), x, lambda logits: F.cross_entropy(logits, y)

Peaks count everything that PyTorch has allocated while one forward and backward run. Gradients are compared with those
of the plain step. Exit codes: 0, 3 if the budget cannot be met, 2 on bad input.
"""


@click.command(epilog=_EPILOG)
@click.argument("source")
@click.option(
    "--budget", required=True, metavar="SIZE",
    help="Memory the step may use, weights and all: bytes with a unit (6GiB), a fraction of the plain peak (0.4), or "
    "auto (what is free on the device).",
)  # fmt: skip
@device_option
@compile_option
@click.option("--steps", default=10, show_default=True, type=click.IntRange(min=1), help="How many steps are timed.")
@click.option("--time-limit", default=30.0, show_default=True, metavar="SECONDS", help="For planning.")
@json_option
def run(
    source: str,
    budget: str,
    device_name: str | None,
    mode: str | None,
    steps: int,
    time_limit: float,
    as_json: bool,
) -> None:
    """Run one training step of SOURCE in several ways, and compare memory, time and gradients.

    As it is, by recoup's plan, with torch.utils.checkpoint on every block, and with PyTorch's own budget
    (activation_memory_budget; compiled mode only).

    SOURCE is package.module:make or path/to/file.py:make, where make() returns (model, inputs) or (model, inputs,
    loss), or a built-in model: resnet50, resnet50:8 (batch 8), resnet50:full. Inputs are a tensor, a tuple or a dict;
    loss is a function from the model's output to a scalar.
    """
    need_torch()
    device = pick_device(device_name)
    from recoup.torch.compare import check_budget

    check_budget(budget, device)
    check_arguments(time_limit, 0, 0.0)
    with quiet_stdout(as_json):
        work = read_workload(source, device)
    found = compared(work, budget, device, pick_mode(mode, device), as_json, steps=steps, time_limit=time_limit)
    if as_json:
        print_json(found.to_data())
    else:
        print_comparison(found)


def compared(
    work: Workload, budget: str, device: torch.device, mode: Mode, as_json: bool, **options: Any
) -> Comparison:
    """The comparison, with progress where somebody looks; ends the command if recoup cannot meet the budget."""
    from recoup.torch.compare import compare

    watched = not as_json and sys.stderr.isatty()

    def say(text: str) -> None:
        if watched:
            click.echo(f"\r\033[K{text}", err=True, nl=False)

    try:
        with quiet_stdout(as_json):
            return compare(work, budget, device, mode, verbose=False if as_json else None, say=say, **options)
    except BudgetError as problem:
        if as_json:
            print_json({"model": work.name, "error": str(problem)})
        else:
            click.echo(f"error: {problem}", err=True)
        sys.exit(3)


def print_comparison(found: Comparison) -> None:
    """One row a contender, memory and time also as a change from plain; notes below."""
    from rich.console import Console
    from rich.table import Table

    plain = found.plain
    title = f"{found.name} on {found.device}, {found.mode}, in {format_bytes(found.budget_bytes)}"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("", style="bold", no_wrap=True)
    for heading in ("peak\npredicted", "peak\nmeasured", "\nstep", "gradients\ndiffer"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows:
        difference = row.gradient_difference
        table.add_row(
            row.name,
            "-" if row.predicted_bytes is None else format_bytes(row.predicted_bytes),
            "-" if row.peak_bytes is None else format_bytes(row.peak_bytes) + _change(row.peak_bytes, plain.peak_bytes),
            "-" if row.seconds is None else _time(row.seconds) + _change(row.seconds, plain.seconds),
            "-" if difference is None or row is plain else "0" if difference == 0 else f"{difference:.1e}",
        )
    Console(highlight=False).print(table)
    for row in found.rows:
        if row.note:
            click.echo(f"{row.name}: {row.note}")


def _change(value: float, plain: float | None) -> str:
    change = "" if not plain or value == plain else f"{100 * (value / plain - 1):+.0f} %"
    return f" {change:>6}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
