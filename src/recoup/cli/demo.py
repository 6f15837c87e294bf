"""``recoup demo``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from recoup.cli.common import print_json
from recoup.cli.run import compared, print_comparison
from recoup.cli.source import device_option, json_option, need_torch, pick_device, pick_mode, read_workload
from recoup.errors import SettingError
from recoup.units import format_bytes

if TYPE_CHECKING:
    import torch

    from recoup.torch.workload import Workload

_EPILOG = """\b
Examples:
  recoup demo
  recoup demo --budget 0.5
  recoup demo --model gpt --device cpu

Exit codes: 0, 3 if the budget cannot be met, 2 on bad input.
"""


@click.command(epilog=_EPILOG)
@click.option("--model", "name", default="resnet50", show_default=True, metavar="NAME", help="A built-in model.")
@click.option(
    "--budget", default="0.6", show_default=True, metavar="SIZE",
    help="Memory the step may use: bytes with a unit, a fraction of the plain peak, or auto (what is free on the "
    "device).",
)  # fmt: skip
@device_option
@json_option
def demo(name: str, budget: str, device_name: str | None, as_json: bool) -> None:
    """Train a built-in model inside a memory budget, on the device that is there, and compare.

    On a CPU the model is a small one, and the demo takes about a minute.
    """
    need_torch()
    device = pick_device(device_name)
    from recoup.torch.compare import check_budget

    check_budget(budget, device)
    work = _workload(name, device)
    if not as_json:
        weights = sum(tensor.numel() * tensor.element_size() for tensor in work.model.parameters())
        click.echo(f"One training step of {work.name} on {device.type}, with {format_bytes(weights)} of weights.")
        click.echo(f"recoup measures its operators and plans which ones to run again to fit in {_room(budget)}.")
        click.echo("The step then runs by that plan, and in other ways to compare. This takes about a minute.\n")
    found = compared(work, budget, device, pick_mode(None, device), as_json, steps=10, time_limit=10.0)
    if as_json:
        print_json({**found.to_data(), "verdict": found.verdict()})
    else:
        print_comparison(found)
        click.echo(f"\nrecoup: {found.verdict()}")


def _room(budget: str) -> str:
    """The budget, as it reads in a sentence."""
    if budget == "auto":
        return "what is free on the device"
    return f"{100 * float(budget):.0f} % of the memory it takes" if budget.replace(".", "").isdigit() else budget


def _workload(name: str, device: torch.device) -> Workload:
    """The full size on a GPU; elsewhere one whose memory is mostly activations, and whose step takes half a second."""
    import torch
    from torch.nn import functional

    from recoup.torch.models import MODELS
    from recoup.torch.workload import SEED, Workload

    if name not in MODELS:
        raise SettingError(f"no model is named {name!r}; known: {', '.join(MODELS)}")
    if device.type == "cuda":
        return read_workload(f"{name}:full", device)
    if name != "resnet50":
        return read_workload(f"{name}:{8 * MODELS[name].small.batch}", device)
    torch.manual_seed(SEED)
    model = MODELS[name].make(width=16, classes=10)
    images, targets = torch.randn(16, 3, 112, 112), torch.randint(10, (16,))
    return Workload("resnet50 (width 16)", model, images, lambda logits: functional.cross_entropy(logits, targets))
