"""Built-in graphs by name, as the command line takes them: ``vgg16``, ``resnet50:32``, ``chain:8``."""

from __future__ import annotations

from collections.abc import Callable

from recoup.errors import GraphError
from recoup.generators.chains import chain, random_chain
from recoup.generators.networks import NETWORKS
from recoup.generators.shapes import random_training, residual, unet_like
from recoup.generators.transformer import transformer
from recoup.graph import Graph

_SHAPES: dict[str, tuple[Callable[[int], Graph], int]] = {
    "chain": (chain, 8),
    "random-chain": (random_chain, 8),
    "residual": (residual, 4),
    "unet-like": (unet_like, 4),
    "random": (random_training, 8),
    "transformer": (transformer, 24),
}


def names() -> list[str]:
    """Every built-in graph; networks take a batch size after the colon, shapes a size."""
    return [*NETWORKS, *_SHAPES]


def named(text: str) -> Graph | None:
    """The built-in graph of that name; None if there is none."""
    name, colon, number = text.partition(":")
    if name not in NETWORKS and name not in _SHAPES:
        return None
    if colon and not (number.isascii() and number.isdigit() and 0 < int(number) <= 10_000):
        raise GraphError(f"{text!r}: after the colon comes a batch or a size up to 10000, as in {name}:32")
    if name in NETWORKS:
        return NETWORKS[name](int(number or 1))
    make, default = _SHAPES[name]
    return make(int(number or default))
