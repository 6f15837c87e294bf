"""What a budget costs on a GPU, and whether it holds.

    python -m benchmarks.torch truth resnet50@9GiB,7.5GiB,6GiB unet@9GiB,7.5GiB,6GiB --mode eager
    python -m benchmarks.torch curve resnet50@8.3GiB,6.04GiB gpt@6GiB,5GiB,4GiB,3.4GiB -o curve.json
    python -m benchmarks.torch overhead resnet50 unet
    python -m benchmarks.torch profile resnet50
    python -m benchmarks.torch dtr resnet50:128@0.5 unet@0.5 treelstm@0.9,0.5 cifar1202@0.9

``truth`` trains within each budget in a process that is limited to the budget and 5 % more, and compares the predicted
peak with the allocator's. ``curve`` measures steps side by side: plain, with a checkpoint on every block, with
PyTorch's own knob, and planned by recoup at each budget. ``overhead`` gives recoup room for everything, and prints what
its step takes of the plain one's time. Each contender has a process of its own; they compile beside each other, and
are measured one after the other. ``profile`` prints how long measuring the operators takes. ``dtr`` runs whole training
steps under the online runtime, at shares of the plain step's peak.
"""

from __future__ import annotations

import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch

import recoup
from benchmarks import machine
from benchmarks.torch.online import runs
from benchmarks.torch.steps import ROOM, SLACK, Contender, Measured, limit_process
from benchmarks.torch.turns import alone, limited, wait_for_turn
from recoup.torch.costs import Cost
from recoup.torch.planning import StepPlanner
from recoup.torch.settings import Mode
from recoup.units import parse_bytes

_models = click.argument("models", nargs=-1, required=True, metavar="MODEL@BUDGET,BUDGET...")
_size = click.option("--size", default="full", show_default=True, type=click.Choice(["full", "small"]))
_device = click.option("--device", default="cuda", show_default=True, type=torch.device)
_mode = click.option("--mode", default="inductor", show_default=True, type=click.Choice(["inductor", "eager"]))
_limit = click.option("--time-limit", default=15.0, show_default=True, help="Seconds of planning per budget.")
_output = click.option("-o", "--output", help="Also write everything to this JSON file.")


@click.group()
def main() -> None:
    """Training steps on a GPU."""
    torch.backends.cudnn.benchmark = True


@main.command()
@_models
@_size
@_device
@_mode
@_limit
@_output
def truth(
    models: tuple[str, ...], size: str, device: torch.device, mode: Mode, time_limit: float, output: str | None
) -> None:
    """Is the predicted peak the measured one, and does the step train in a process limited to its budget?"""
    ours = [one for text in models for one in _planned(text, size, device, mode, time_limit)]
    _profile(ours)
    _report(ours, output, SLACK)


@main.command()
@_models
@_size
@_device
@_mode
@click.option("--knobs", default="0.5,0.3", show_default=True, help="Settings of PyTorch's activation_memory_budget.")
@click.option("--peers/--no-peers", default=True, help="Also measure checkpoints and the knob.")
@_limit
@_output
def curve(
    models: tuple[str, ...],
    size: str,
    device: torch.device,
    mode: Mode,
    knobs: str,
    peers: bool,
    time_limit: float,
    output: str | None,
) -> None:
    """Steps side by side: PyTorch's own points, and recoup at each budget."""
    entries: list[Contender] = []
    for text in models:
        model = text.partition("@")[0]
        kinds = ["plain"]
        if peers:
            kinds += ["checkpoint"] + [f"knob={knob}" for knob in knobs.split(",") if mode == "inductor"]
        entries += [Contender(model, size, device, mode, kind, time_limit) for kind in kinds]
        entries += _planned(text, size, device, mode, time_limit)
    _profile(entries)
    _report(entries, output)


@main.command()
@click.argument("models", nargs=-1, required=True)
@_size
@_device
@_mode
@_output
def overhead(models: tuple[str, ...], size: str, device: torch.device, mode: Mode, output: str | None) -> None:
    """With room for everything: what recoup adds to the plain step."""
    entries = [
        Contender(model, size, device, mode, kind) for model in models for kind in ("plain", f"recoup={ROOM}", "plain")
    ]
    found = _report(entries, output)
    for before, ours, after in zip(found[::3], found[1::3], found[2::3], strict=True):
        ratio = 2 * ours.seconds / (before.seconds + after.seconds)
        print(f"{ours.model:10} {mode}: recoup takes {ratio:.4f} of plain's time", flush=True)


@main.command()
@click.argument("models", nargs=-1, required=True)
@_size
@_device
@_mode
@click.option("--try-algorithms", is_flag=True, help="Turn cudnn.benchmark on, as the other benchmarks do.")
def profile(models: tuple[str, ...], size: str, device: torch.device, mode: Mode, try_algorithms: bool) -> None:
    """How long measuring a model's operators takes when none is known yet."""
    torch.backends.cudnn.benchmark = try_algorithms
    measure = StepPlanner.costs
    taken: list[float] = []
    known: dict[str, Cost] = {}

    def timed(*args: Any) -> dict[str, Cost]:
        start = time.perf_counter()
        costs = measure(*args)
        taken.append(time.perf_counter() - start)
        known.update(costs)
        return costs

    for model in models:
        taken.clear()
        known.clear()
        with tempfile.TemporaryDirectory() as cache, mock.patch.object(StepPlanner, "costs", timed):
            Contender(model, size, device, mode, f"recoup={ROOM}").profile(cache)
        print(f"{model:10} {mode}: {len(known)} distinct operators measured in {sum(taken):.1f} s", flush=True)
        torch.compiler.reset()
    print(_where(), flush=True)


@main.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL[:BATCH]@SHARE,SHARE...")
@_size
@_device
@click.option("--sample", is_flag=True, help="Choose what to evict from a sample.")
def dtr(models: tuple[str, ...], size: str, device: torch.device, sample: bool) -> None:
    """The online runtime: with room for everything, and at shares of the plain peak, online and learned.

    MODEL is one of recoup's, treelstm, or cifarN for a CIFAR ResNet of N layers.
    """
    torch.backends.cudnn.benchmark = False  # trying algorithms out takes memory that nobody counted on
    for text in models:
        model, _, shares = text.partition("@")
        try:
            for ran in runs(model, [float(share) for share in shares.split(",") if share], size, device, sample):
                print(ran.row(), flush=True)
        except recoup.BudgetError as problem:
            print(f"{model:12} {problem}", flush=True)
    print(_where(), flush=True)


@main.command(hidden=True)
@click.argument("model")
@click.argument("kind")
@_size
@_device
@_mode
@_limit
@click.option("--turn", type=Path)
@click.option("--limit", type=int)
def contender(
    model: str,
    kind: str,
    size: str,
    device: torch.device,
    mode: Mode,
    time_limit: float,
    turn: Path | None,
    limit: int | None,
) -> None:
    """One contender, in this process."""
    if limit is not None and device.type == "cuda":
        limit_process(limit)
    one = Contender(model, size, device, mode, kind, time_limit)
    found = one.measure(partial(wait_for_turn, turn)) if turn is not None else one.measure()
    print(json.dumps(found.data()))


def _planned(text: str, size: str, device: torch.device, mode: Mode, time_limit: float) -> list[Contender]:
    model, _, budgets = text.partition("@")
    sizes = [parse_bytes(budget) for budget in budgets.split(",") if budget]
    return [Contender(model, size, device, mode, f"recoup={bytes_}", time_limit) for bytes_ in sizes]


def _profile(entries: list[Contender]) -> None:
    for one in {entry.model: entry for entry in entries if entry.kind.startswith("recoup")}.values():
        start = time.perf_counter()
        one.profile()
        print(f"{one.model:10} profiled in {time.perf_counter() - start:.1f} s", flush=True)
        torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _report(entries: list[Contender], output: str | None, slack: float | None = None) -> list[Measured]:
    records: list[Measured] = []
    for one, found in alone(entries) if slack is None else limited(entries, slack):
        if isinstance(found, str):
            print(f"{one.model:10} {one.kind} {one.mode}: {found}", flush=True)
        else:
            print(found.row(), flush=True)
            records.append(found)
    print(_where(), flush=True)
    if output is not None:
        data = {"machine": _where(), "results": [record.data() for record in records]}
        Path(output).write_text(json.dumps(data, indent=1) + "\n")
    return records


def _where() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{device}, torch {torch.__version__}; {machine.describe()}"


main()
