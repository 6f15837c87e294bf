"""Small graphs with the shapes that make planning hard: residual blocks, U-Nets, random layers."""

from __future__ import annotations

import numpy as np

from recoup.generators.training import INPUT, Layer, training_graph
from recoup.graph import Graph


def residual(blocks: int, depth: int = 2) -> Graph:
    """``blocks`` residual blocks of ``depth`` unit layers, each closed by an addition."""
    layers: list[Layer] = [_unit("stem", (INPUT,))]
    for block in range(1, blocks + 1):
        shortcut = x = layers[-1].id
        for position in range(1, depth + 1):
            layers.append(_unit(f"r{block}.{position}", (x,)))
            x = layers[-1].id
        join = Layer(f"r{block}.add", (shortcut, x), 1, 1, 1, keeps_inputs=False, passes_gradient=True)
        layers.append(join)
    return training_graph(f"residual-{blocks}x{depth}", layers)


def unet_like(depth: int) -> Graph:
    """An encoder, a decoder and ``depth`` skips between them; sizes halve with each level."""
    layers: list[Layer] = []
    x, skips = INPUT, []
    for level in range(depth + 1):
        size = 2 ** (depth - level)
        layers.append(_unit(f"down{level}", (x,), size))
        x = f"down{level}"
        skips.append(x)
    for level in range(depth - 1, -1, -1):
        layers.append(_unit(f"up{level}", (x, skips[level]), 2 ** (depth - level)))
        x = f"up{level}"
    return training_graph(f"unet-{depth}", layers)


def random_training(layers: int, seed: int = 0) -> Graph:
    """A random network and its training step: skips, stashes, workspaces, uneven sizes and times, all integers."""
    rng = np.random.default_rng(seed)
    made: list[Layer] = []
    for i in range(layers):
        reach = [layer.id for layer in made[-4:]]
        count = min(len(reach), int(rng.integers(1, 3)))
        inputs = tuple(sorted({reach[-1], *rng.choice(reach, count).tolist()})) if reach else (INPUT,)
        time = int(rng.integers(1, 11))
        made.append(
            Layer(
                id=f"l{i}",
                inputs=inputs,
                bytes=int(rng.integers(1, 9)),
                time=time,
                backward_time=time * int(rng.integers(1, 3)),
                keeps_inputs=bool(rng.random() < 0.7),
                keeps_output=bool(rng.random() < 0.4),
                stash=int(rng.integers(1, 5)) if rng.random() < 0.3 else 0,
                workspace=int(rng.integers(0, 4)) if rng.random() < 0.3 else 0,
                backward_workspace=int(rng.integers(0, 4)) if rng.random() < 0.3 else 0,
            )
        )
    return training_graph(
        f"random-{layers}-{seed}",
        made,
        input_bytes=int(rng.integers(0, 5)),
        fixed_bytes=int(rng.integers(0, 20)),
        keep_input_gradient=bool(rng.random() < 0.3),
    )


def _unit(id: str, inputs: tuple[str, ...], size: int = 1) -> Layer:
    return Layer(id, inputs, size, 1, 1, keeps_inputs=False, keeps_output=True)
