"""What a budget costs on a GPU, and whether it holds.

    python -m benchmarks.torch truth resnet50 --mode eager --budgets 0.6,0.5,0.4
    python -m benchmarks.torch curve gpt --budgets 6GiB,5GiB,4GiB,3.4GiB -o gpt.json
    python -m benchmarks.torch overhead resnet50

``truth`` trains within each budget in a process of its own that is limited to the budget and 5 % more, and compares the
predicted peak with the allocator's. ``curve`` measures compiled steps side by side: plain, with a checkpoint on every
block, with PyTorch's own knob, and planned by recoup at each budget. A fraction is of the plain step's measured peak.
``overhead`` gives recoup room for everything, and prints what its step takes of the plain one's time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import torch

import recoup
from benchmarks import machine
from benchmarks.torch.steps import Measured, build, checkpoint_blocks, forget, measure, planned
from recoup.units import resolve_budget

SLACK = 0.05  # a limited process may reserve this much more than the budget

_model = click.argument("model")
_size = click.option("--size", default="full", show_default=True, type=click.Choice(["full", "small"]))
_device = click.option("--device", default="cuda", show_default=True)
_budgets = click.option("--budgets", required=True, help="With commas: fractions of the plain peak, or sizes.")
_limit = click.option("--time-limit", default=15.0, show_default=True, help="Seconds of planning per budget.")
_output = click.option("-o", "--output", help="Also write everything to this JSON file.")


@click.group()
def main() -> None:
    """Training steps on a GPU."""
    torch.backends.cudnn.benchmark = True


@main.command()
@_model
@_size
@_device
@click.option("--mode", default="inductor", show_default=True, type=click.Choice(["inductor", "eager"]))
@_budgets
@_limit
@_output
def truth(model: str, size: str, device: str, mode: str, budgets: str, time_limit: float, output: str | None) -> None:
    """Is the predicted peak the measured one, and does the step train in a process limited to its budget?"""
    place = torch.device(device)
    made = build(model, size, place)
    if mode == "inductor":
        made.model.compile()
    plain = measure(model, f"plain {mode}", made, place)
    print(plain.row(), flush=True)
    del made
    forget()
    records = [plain.data()]
    for budget in budgets.split(","):
        size_bytes = resolve_budget(budget, plain.peak_bytes)
        command = [sys.executable, "-m", "benchmarks.torch", "limited", model, str(size_bytes), "--mode", mode]
        command += ["--size", size, "--device", device, "--time-limit", str(time_limit)]
        environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(f"{model:10} recoup {mode} in {budget}: failed\n{done.stderr[-2000:]}", flush=True)
            continue
        found = Measured(**json.loads(done.stdout.splitlines()[-1]))
        print(found.row(), flush=True)
        records.append(found.data())
    _write(output, records)


@main.command(hidden=True)
@_model
@click.argument("budget", type=int)
@_size
@_device
@click.option("--mode", required=True)
@_limit
def limited(model: str, budget: int, size: str, device: str, mode: str, time_limit: float) -> None:
    """One budget, in this process, which may take no more than the budget and 5 % of it."""
    place = torch.device(device)
    if place.type == "cuda":
        total = torch.cuda.get_device_properties(place).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget * (1 + SLACK) / total), 0)
    found = planned(
        model, build(model, size, place), place, budget, "eager" if mode == "eager" else "inductor", time_limit
    )
    print(json.dumps(found.data()))


@main.command()
@_model
@_size
@_device
@click.option("--mode", default="eager", show_default=True, type=click.Choice(["inductor", "eager"]))
@click.option("--rounds", default=5, show_default=True, help="How often the two are measured, in turns.")
@_output
def overhead(model: str, size: str, device: str, mode: str, rounds: int, output: str | None) -> None:
    """With room for everything: what recoup adds to the plain step."""
    place = torch.device(device)
    plain, ours = build(model, size, place), build(model, size, place)
    if mode == "inductor":
        plain.model.compile()
    recoup.optimize(ours.model, budget=2**50, compile="eager" if mode == "eager" else "inductor")
    found = [
        [measure(model, name, made, place) for name, made in (("plain", plain), ("recoup", ours))]
        for _ in range(rounds)
    ]
    ratios = sorted(second.seconds / first.seconds for first, second in found)
    print(
        f"{model:10} {mode}: recoup takes {ratios[rounds // 2]:.4f} of plain's time "
        f"({ratios[0]:.4f} to {ratios[-1]:.4f} in {rounds} rounds)"
    )
    _write(output, [one.data() for pair in found for one in pair])


@main.command()
@_model
@_size
@_device
@_budgets
@click.option("--knobs", default="0.5,0.3", show_default=True, help="Settings of PyTorch's activation_memory_budget.")
@click.option("--peers/--no-peers", default=True, help="Also measure what PyTorch offers.")
@_limit
@_output
def curve(
    model: str, size: str, device: str, budgets: str, knobs: str, peers: bool, time_limit: float, output: str | None
) -> None:
    """Compiled steps side by side: PyTorch's own points, and recoup at each budget."""
    place = torch.device(device)
    records: list[Measured] = []

    def show(found: Measured) -> None:
        records.append(found)
        print(found.row(), flush=True)
        forget()

    plain = build(model, size, place)
    plain.model.compile()
    show(measure(model, "compile", plain, place))
    del plain
    if peers:
        made = build(model, size, place)
        checkpoint_blocks(made)
        made.model.compile()
        show(measure(model, "compile, checkpoint", made, place))
        del made
        for knob in knobs.split(","):
            with torch._functorch.config.patch(activation_memory_budget=float(knob)):
                made = build(model, size, place)
                made.model.compile()
                show(measure(model, f"compile, knob {knob}", made, place))
                del made
    for budget in budgets.split(","):
        size_bytes = resolve_budget(budget, records[0].peak_bytes)
        assert size_bytes is not None
        try:
            show(planned(model, build(model, size, place), place, size_bytes, "inductor", time_limit))
        except Exception as problem:
            print(f"{model:10} recoup in {budget}: {problem}", flush=True)
            forget()
    _write(output, [record.data() for record in records])


def _write(output: str | None, records: list[dict[str, object]]) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    where = f"{device}, torch {torch.__version__}; {machine.describe()}"
    print(where, flush=True)
    if output is not None:
        Path(output).write_text(json.dumps({"machine": where, "results": records}, indent=1) + "\n")


main()
