"""DenseNet-BC (Huang et al., 2017): every layer of a dense block reads what all layers before it made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recoup.torch.models.common import BlockModel, conv_norm_relu


def _norm_relu_conv(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
    )


class DenseLayer(nn.Module):
    """One layer of a dense block: a 1x1 bottleneck of four times the growth, then a 3x3 convolution.

    It concatenates its inputs itself, so that checkpointing the layer also drops the concatenation, whose copies are
    what makes a plain DenseNet quadratic in memory.
    """

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _norm_relu_conv(inputs, 4 * growth, 1),
            _norm_relu_conv(4 * growth, growth, 3),
        )

    def forward(self, *features: Tensor) -> Tensor:
        """The ``growth`` new channels alone."""
        new: Tensor = self.body(torch.cat(features, dim=1))
        return new


class DenseBlock(nn.Module):
    """Layers that each add ``growth`` channels to all that came before."""

    def __init__(self, inputs: int, growth: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + i * growth, growth) for i in range(count))
        self.outputs = inputs + count * growth

    def forward(self, x: Tensor) -> Tensor:
        """The input and every layer's channels, concatenated."""
        features = [x]
        for layer in self.layers:
            features.append(layer(*features))
        return torch.cat(features, dim=1)


class DenseNet(BlockModel):
    """DenseNet-121 unless told otherwise; 161 has growth 48 and layers (6, 12, 36, 24)."""

    def __init__(self, layers: Sequence[int] = (6, 12, 24, 16), growth: int = 32, classes: int = 1000) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = nn.Sequential(conv_norm_relu(3, channels, 7, 2), nn.MaxPool2d(3, 2, padding=1))
        self.body = nn.ModuleList()
        for stage, count in enumerate(layers):
            if stage:
                self.body.append(nn.Sequential(_norm_relu_conv(channels, channels // 2, 1), nn.AvgPool2d(2)))
                channels //= 2
            block = DenseBlock(channels, growth, count)
            self.body.append(block)
            channels = block.outputs
        self.head = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, classes),
        )

    def blocks(self) -> list[nn.Module]:
        """The layers of all dense blocks."""
        return [module for module in self.modules() if isinstance(module, DenseLayer)]

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes)."""
        x = self.stem(x)
        for module in self.body:
            x = module(x)
        logits: Tensor = self.head(x)
        return logits
