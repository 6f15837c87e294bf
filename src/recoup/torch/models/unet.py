"""U-Net (Ronneberger et al., 2015) as people train it today: padded, so that the size is kept, and with batch norm."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from recoup.torch.models.common import BlockModel, conv_norm_relu


def _double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(conv_norm_relu(inputs, outputs, 3), conv_norm_relu(outputs, outputs, 3))


class Up(nn.Module):
    """Doubles the size, puts the encoder's features of that size alongside, and convolves twice."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
        self.convs = _double_conv(2 * outputs, outputs)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Features of ``skip``'s size."""
        out: Tensor = self.convs(torch.cat([skip, self.up(x)], dim=1))
        return out


class UNet(BlockModel):
    """``depth`` halvings from ``width`` channels up to ``width * 2**depth``; sizes must divide by ``2**depth``."""

    def __init__(self, width: int = 64, depth: int = 4, channels: int = 3, classes: int = 2) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.downs = nn.ModuleList(map(_double_conv, [channels, *widths[:-1]], widths))
        self.pool = nn.MaxPool2d(2)
        self.ups = nn.ModuleList(Up(2 * outputs, outputs) for outputs in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def blocks(self) -> list[nn.Module]:
        """The double convolutions on the way down, and the steps up: ``up(x, skip)``."""
        return [*self.downs, *self.ups]

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes, height, width)."""
        skips: list[Tensor] = []
        for i, down in enumerate(self.downs):
            x = down(self.pool(x) if i else x)
            skips.append(x)
        skips.pop()  # the bottom has nothing to skip to
        for up in self.ups:
            x = up(x, skips.pop())
        return cast(Tensor, self.head(x))
