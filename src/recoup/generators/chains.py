"""Chains: the graphs of the checkpointing papers, for tests, demos and closed-form answers."""

from __future__ import annotations

import numpy as np

from recoup.builder import GraphBuilder
from recoup.errors import GraphError
from recoup.graph import Graph


def chain(layers: int) -> Graph:
    """A unit chain: ``layers`` forward ops, a loss, ``layers`` backward ops; all cost 1 and make 1 byte.

    Backward ``i`` needs activation ``i`` and the next gradient. Eight layers are the 17-node network of section 4.6
    and Appendix A of the Checkmate paper.
    """
    return heterogeneous_chain([1] * layers, [1] * layers)


def heterogeneous_chain(
    times: list[int] | list[float], sizes: list[int], *, backward: float = 1, name: str | None = None
) -> Graph:
    """A chain whose layer ``i`` takes ``times[i]`` and makes ``sizes[i]`` bytes; backward takes ``backward`` times."""
    layers = len(times)
    if not layers or len(sizes) != layers:
        raise GraphError(f"a chain needs a time and a size for each layer, and at least one: {layers} and {len(sizes)}")
    b = GraphBuilder(name or f"chain-{layers}", time_unit="unit")
    below: tuple[str, ...] = ()
    for i in range(1, layers + 1):
        below = b.op(f"f{i}", inputs=below, outputs={f"a{i}": sizes[i - 1]}, time=times[i - 1])
    last = sizes[-1]
    above = b.op("loss", inputs=below, outputs={f"g{layers + 1}": last}, time=1)
    for i in range(layers, 0, -1):
        time = times[i - 1] * backward
        above = b.op(f"b{i}", inputs=[f"a{i}", *above], outputs={f"g{i}": sizes[i - 1]}, time=time, phase="backward")
    return b.build()


def random_chain(layers: int, seed: int = 0) -> Graph:
    """A chain with random integer times (1 to 10) and sizes (1 to 8)."""
    rng = np.random.default_rng(seed)
    times = rng.integers(1, 11, layers).tolist()
    sizes = rng.integers(1, 9, layers).tolist()
    return heterogeneous_chain(times, sizes, backward=2, name=f"random-chain-{layers}-{seed}")
