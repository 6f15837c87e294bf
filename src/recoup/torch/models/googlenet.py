"""GoogLeNet (Szegedy et al., 2015) with batch norm in place of local response normalisation, no auxiliary heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recoup.torch.models.common import BlockModel, conv_norm_relu

_POOL = "pool"
_INCEPTIONS = (  # table 1 of the paper: 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    _POOL,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    _POOL,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)


class Inception(nn.Module):
    """Four branches that look at the same input, side by side in the channels of the result."""

    def __init__(self, inputs: int, one: int, reduce3: int, three: int, reduce5: int, five: int, pool: int) -> None:
        super().__init__()
        self.one = conv_norm_relu(inputs, one, 1)
        self.three = nn.Sequential(conv_norm_relu(inputs, reduce3, 1), conv_norm_relu(reduce3, three, 3))
        self.five = nn.Sequential(conv_norm_relu(inputs, reduce5, 1), conv_norm_relu(reduce5, five, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), conv_norm_relu(inputs, pool, 1))
        self.outputs = one + three + five + pool

    def forward(self, x: Tensor) -> Tensor:
        """The branches' results, concatenated."""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)


class GoogLeNet(BlockModel):
    """Nine inception modules; ``width`` multiplies all channels."""

    def __init__(self, width: float = 1.0, classes: int = 1000, dropout: float = 0.4) -> None:
        super().__init__()
        first, channels = round(64 * width), round(192 * width)
        self.stem = nn.Sequential(
            conv_norm_relu(3, first, 7, 2),
            nn.MaxPool2d(3, 2, padding=1),
            conv_norm_relu(first, first, 1),
            conv_norm_relu(first, channels, 3),
            nn.MaxPool2d(3, 2, padding=1),
        )
        self.body = nn.ModuleList()
        for sizes in _INCEPTIONS:
            if isinstance(sizes, str):
                self.body.append(nn.MaxPool2d(3, 2, padding=1))
                continue
            inception = Inception(channels, *(round(size * width) for size in sizes))
            self.body.append(inception)
            channels = inception.outputs
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels, classes)
        )

    def blocks(self) -> list[nn.Module]:
        """The inception modules."""
        return [module for module in self.body if isinstance(module, Inception)]

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes)."""
        x = self.stem(x)
        for module in self.body:
            x = module(x)
        logits: Tensor = self.head(x)
        return logits
