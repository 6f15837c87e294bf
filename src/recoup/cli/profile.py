"""``recoup profile``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from recoup.cli.common import percent, print_json, print_rows
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
from recoup.files import check_writable
from recoup.graph import Graph
from recoup.judge import simulate
from recoup.schedule import Schedule
from recoup.units import format_bytes

_EPILOG = """\b
Examples:
  recoup profile resnet50:16
  recoup profile training.model:make --device cuda -o graph.json
  recoup profile train.py:make --compile inductor -o graph.json
  recoup profile resnet50:full --estimate -o graph.json
  recoup solve graph.json --budget 0.5

\b
where train.py has, for example,
  def make():
      return MyModel(), torch.randn(16, 3, 224, 224)
"""


@click.command(epilog=_EPILOG)
@click.argument("source")
@device_option
@compile_option
@click.option(
    "--estimate", is_flag=True, help="For a GPU that is not here: measure nothing, take FLOPs and bytes over its rates."
)
@click.option("-o", "--output", metavar="GRAPH", help="Write the graph to this file.")
@json_option
def profile(
    source: str, device_name: str | None, mode: str | None, estimate: bool, output: str | None, as_json: bool
) -> None:
    """Capture one training step of SOURCE, measure its operators, and write its graph.

    SOURCE is package.module:make or path/to/file.py:make, where make() returns (model, inputs) or (model, inputs,
    loss), or a built-in model: resnet50, resnet50:8 (batch 8), resnet50:full. Inputs are a tensor, a tuple or a dict;
    loss is a function from the model's output to a scalar.
    """
    need_torch()
    if output is not None:
        check_writable(output)
    device = pick_device("cpu" if estimate else device_name)
    from recoup.torch.compare import captured

    with quiet_stdout(as_json):
        work = read_workload(source, device)
        graph = captured(work, pick_mode(mode, device), verbose=False if as_json else None, estimate=estimate)
    if output is not None:
        graph.save(output)
    data = _data(graph)
    if as_json:
        print_json(data)
    else:
        _print(data, output)


def _data(graph: Graph) -> dict[str, Any]:
    runs = Counter(op.name or op.id for op in graph.ops)
    seconds: dict[str, float] = dict.fromkeys(runs, 0.0)
    for op in graph.ops:
        seconds[op.name or op.id] += op.time
    dearest = sorted(seconds, key=lambda name: -seconds[name])[:5]
    plain = simulate(graph, Schedule.default(graph))
    return {
        "graph": graph.name,
        "fingerprint": graph.fingerprint,
        "ops": len(graph.ops),
        "values": len(graph.values),
        "peak_bytes": plain.peak_bytes,
        "resident_bytes": graph.resident_bytes,
        "seconds": plain.cost,
        "most_expensive": [{"name": name, "count": runs[name], "seconds": seconds[name]} for name in dearest],
    }


def _print(data: dict[str, Any], output: str | None) -> None:
    rows = [
        ("graph", f"{data['graph']}   fingerprint {data['fingerprint'][:12]}"),
        ("ops", str(data["ops"])),
        ("values", str(data["values"])),
        ("peak", f"{format_bytes(data['peak_bytes'])} with nothing recomputed"),
        ("resident", format_bytes(data["resident_bytes"])),
        ("time", f"{1000 * data['seconds']:.4g} ms, the sum over all ops"),
    ]
    for position, kind in enumerate(data["most_expensive"]):
        share = percent(kind["seconds"] / data["seconds"]) if data["seconds"] else "-"
        line = f"{kind['name']} x{kind['count']}: {1000 * kind['seconds']:.4g} ms ({share})"
        rows.append(("" if position else "dearest", line))
    if output is not None:
        rows.append(("written", output))
    print_rows(rows)
