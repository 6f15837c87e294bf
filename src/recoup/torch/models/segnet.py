"""SegNet (Badrinarayanan et al., 2017): VGG16's convolutions and their mirror image.

The decoder puts values back where max pooling took them from, so the pooling indices live as long as skips do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from recoup.torch.models.common import BlockModel, conv_norm_relu
from recoup.torch.models.vgg import VGG16


def _convs(widths: Sequence[int]) -> nn.Sequential:
    return nn.Sequential(*(conv_norm_relu(a, b, 3) for a, b in pairwise(widths)))


class SegNet(BlockModel):
    """``convs`` convolutions a stage; sizes must divide by two to the number of stages."""

    def __init__(self, convs: Sequence[int] = VGG16, width: int = 64, classes: int = 21) -> None:
        super().__init__()
        widths = [width * min(2**i, 8) for i in range(len(convs))]
        self.encoder = nn.ModuleList()
        self.decoder = nn.ModuleList()
        for count, inputs, outputs in zip(convs, [3, *widths[:-1]], widths, strict=True):
            self.encoder.append(_convs([inputs] + [outputs] * count))
            narrow = [inputs] if inputs != 3 else []  # the outermost decoder ends in the classifier instead
            self.decoder.insert(0, _convs([outputs] * count + narrow))
        self.head = nn.Conv2d(width, classes, 3, padding=1)

    def blocks(self) -> list[nn.Module]:
        """The stages' convolutions, without pooling and unpooling: those also hand indices over."""
        return [*self.encoder, *self.decoder]

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes, height, width)."""
        indices: list[Tensor] = []
        for stage in self.encoder:
            x, index = functional.max_pool2d(stage(x), 2, return_indices=True)
            indices.append(index)
        for stage in self.decoder:
            x = stage(functional.max_unpool2d(x, indices.pop(), (2, 2)))
        return cast(Tensor, self.head(x))
