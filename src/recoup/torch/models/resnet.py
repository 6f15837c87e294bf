"""ResNet with bottlenecks (He et al., 2016), the stride on the 3x3 convolution as everyone trains it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from recoup.torch.models.common import BlockModel, conv_norm_relu

_EXPANSION = 4


class Residual(nn.Module):
    """A body around which there is a shortcut; that is a convolution where the shape changes."""

    def __init__(self, body: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """The sum is written over the body's result, as everyone does."""
        out: Tensor = self.body(x)
        out += self.shortcut(x)
        return cast(Tensor, self.relu(out))


def bottleneck(inputs: int, width: int, stride: int) -> Residual:
    """1x1, 3x3 and 1x1 convolutions."""
    outputs = width * _EXPANSION
    body = nn.Sequential(
        conv_norm_relu(inputs, width, 1),
        conv_norm_relu(width, width, 3, stride),
        nn.Conv2d(width, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
    )
    return Residual(body, inputs, outputs, stride)


class ResNet(BlockModel):
    """ResNet-50 unless ``layers`` (bottlenecks a stage) says otherwise."""

    def __init__(self, layers: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm_relu(3, width, 7, 2), nn.MaxPool2d(3, 2, padding=1))
        self.bottlenecks = nn.ModuleList()
        channels = width
        for stage, count in enumerate(layers):
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                self.bottlenecks.append(bottleneck(channels, width * 2**stage, stride))
                channels = width * 2**stage * _EXPANSION
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))

    def blocks(self) -> list[nn.Module]:
        """The bottlenecks."""
        return list(self.bottlenecks)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes)."""
        x = self.stem(x)
        for block in self.bottlenecks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits
