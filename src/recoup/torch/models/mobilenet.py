"""MobileNet v1 (Howard et al., 2017) and v2 (Sandler et al., 2018). ``width`` multiplies the channels."""

from __future__ import annotations

from torch import Tensor, nn

from recoup.torch.models.common import BlockModel, conv_norm_relu

_V1 = (  # channels, stride
    *((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)),
    *((512, 1),) * 5,
    *((1024, 2), (1024, 1)),
)
_V2 = (  # expansion, channels, repeats, stride of the first
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
)


class MobileNet(BlockModel):
    """Version 1: depthwise 3x3 convolutions, each followed by a 1x1 convolution."""

    def __init__(self, width: float = 1.0, classes: int = 1000) -> None:
        super().__init__()
        channels = round(32 * width)
        self.stem = conv_norm_relu(3, channels, 3, 2)
        self.pairs = nn.ModuleList()
        for base, stride in _V1:
            outputs = round(base * width)
            depthwise = conv_norm_relu(channels, channels, 3, stride, groups=channels)
            self.pairs.append(nn.Sequential(depthwise, conv_norm_relu(channels, outputs, 1)))
            channels = outputs
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))

    def blocks(self) -> list[nn.Module]:
        """The pairs of a depthwise and a 1x1 convolution."""
        return list(self.pairs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes)."""
        x = self.stem(x)
        for pair in self.pairs:
            x = pair(x)
        logits: Tensor = self.head(x)
        return logits


class InvertedResidual(nn.Module):
    """Widen, filter each channel, narrow without a ReLU; the shortcut joins the narrow ends where they match."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        layers: list[nn.Module] = [conv_norm_relu(inputs, wide, 1, activation=nn.ReLU6)] if expansion > 1 else []
        self.body = nn.Sequential(
            *layers,
            conv_norm_relu(wide, wide, 3, stride, groups=wide, activation=nn.ReLU6),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """The narrow result, added to the input where the shape allows."""
        out: Tensor = self.body(x)
        return x + out if self.residual else out


class MobileNetV2(BlockModel):
    """Version 2: inverted residuals. As in the paper, a width below one leaves the last convolution alone."""

    def __init__(self, width: float = 1.0, classes: int = 1000, dropout: float = 0.2) -> None:
        super().__init__()
        channels = round(32 * width)
        self.stem = conv_norm_relu(3, channels, 3, 2, activation=nn.ReLU6)
        self.residuals = nn.ModuleList()
        for expansion, base, repeats, stride in _V2:
            outputs = round(base * width)
            for i in range(repeats):
                self.residuals.append(InvertedResidual(channels, outputs, stride if i == 0 else 1, expansion))
                channels = outputs
        last = round(1280 * max(width, 1.0))
        self.head = nn.Sequential(
            conv_norm_relu(channels, last, 1, activation=nn.ReLU6),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(last, classes),
        )

    def blocks(self) -> list[nn.Module]:
        """The inverted residuals."""
        return list(self.residuals)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes)."""
        x = self.stem(x)
        for residual in self.residuals:
            x = residual(x)
        logits: Tensor = self.head(x)
        return logits
