"""The picture in docs/optimal.md: memory over a step, plain and planned, and the cuts that the planner looked at.

python -m benchmarks.picture docs/optimal.svg
"""

from __future__ import annotations

import click
import numpy as np

from recoup import Schedule, Simulation, simulate, solve
from recoup.generators import NETWORKS
from recoup.planners.optimal import Search
from recoup.solvers.program import Floats
from recoup.task import Clock, Task


@click.command()
@click.argument("output")
def main(output: str) -> None:
    """Draw ResNet-50 at batch 16 in 0.45 of its plain peak."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    graph = NETWORKS["resnet50"](16)
    plain = simulate(graph, Schedule.default(graph))
    solution = solve(graph, 0.45, time_limit=20)
    assert solution.schedule is not None
    planned = simulate(graph, solution.schedule)
    task = Task(graph, solution.budget_bytes, "optimal", Clock(10.0), gap=0.02)
    search = Search(task)
    search.run()

    gib = 2.0**30
    figure, axes = pyplot.subplots(figsize=(9, 4.2), layout="constrained")
    axes.plot(plain.memory / gib, color="0.6", label="nothing recomputed")
    axes.plot(_stage_peaks(planned), color="C0", label="planned")
    axes.axhline((solution.budget_bytes or 0) / gib, color="C3", linewidth=1, label="budget")
    top = plain.memory.max() / gib
    edges = [*sorted(search.cuts), len(graph.ops)]
    for c, t in enumerate(sorted(search.cuts), start=1):
        axes.axvline(t, color="k", linestyle="--", linewidth=0.8)
        axes.text(t, 1.11 * top, f"$t_{c}$", ha="center", va="bottom")
        axes.text((t + edges[c]) / 2, 0.04 * top, f"period {c}", ha="center", fontsize=8, color="0.3")
    axes.set_xlabel("first run of op")
    axes.set_ylabel("memory (GiB)")
    axes.set_ylim(bottom=0, top=1.1 * top)
    axes.legend(loc="upper left")
    figure.savefig(output)


def _stage_peaks(judged: Simulation) -> Floats:
    """The most memory in use in each stage, in GiB: while ops run again before a first run, and while that runs."""
    first = np.unique(judged.schedule.ops, return_index=True)[1]
    begins = np.concatenate([[0], first[:-1] + 1])
    return np.array([judged.memory[b : e + 1].max() for b, e in zip(begins, first, strict=True)]) / 2.0**30


if __name__ == "__main__":
    main()
