"""Graphs to try things on: chains, residual and U-Net shapes, random graphs, the papers' networks."""

from recoup.generators.chains import chain, heterogeneous_chain, random_chain
from recoup.generators.names import named, names
from recoup.generators.networks import NETWORKS
from recoup.generators.shapes import random_training, residual, unet_like
from recoup.generators.training import INPUT, Layer, training_graph
from recoup.generators.transformer import transformer

__all__ = [
    "INPUT",
    "NETWORKS",
    "Layer",
    "chain",
    "heterogeneous_chain",
    "named",
    "names",
    "random_chain",
    "random_training",
    "residual",
    "training_graph",
    "transformer",
    "unet_like",
]
