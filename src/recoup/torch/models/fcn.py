"""FCN-8s (Long et al., 2015): VGG16 made convolutional, its scores refined with those of two earlier stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recoup.torch.models.common import BlockModel, he_init
from recoup.torch.models.vgg import VGG16, vgg_stages


def _upsample(classes: int, factor: int) -> nn.ConvTranspose2d:
    """A transposed convolution that starts as bilinear interpolation, each class by itself."""
    layer = nn.ConvTranspose2d(classes, classes, 2 * factor, stride=factor, padding=factor // 2, bias=False)
    tent = 1 - (torch.arange(2 * factor) - (factor - 0.5)).abs() / factor
    with torch.no_grad():
        layer.weight.copy_(torch.eye(classes)[:, :, None, None] * tent[:, None] * tent)
    return layer


class FCN8(BlockModel):
    """Padded to keep the size, where the paper pads by 100 pixels and crops; sizes must divide by 32."""

    def __init__(self, width: int = 64, hidden: int = 4096, classes: int = 21, dropout: float = 0.5) -> None:
        super().__init__()
        self.stages = vgg_stages(VGG16, width)
        self.classifier = nn.Sequential(
            nn.Conv2d(width * 8, hidden, 7, padding=3),
            nn.ReLU(inplace=True),
            nn.Dropout2d(dropout),
            nn.Conv2d(hidden, hidden, 1),
            nn.ReLU(inplace=True),
            nn.Dropout2d(dropout),
        )
        self.score = nn.Conv2d(hidden, classes, 1)
        self.score4 = nn.Conv2d(width * 8, classes, 1)
        self.score3 = nn.Conv2d(width * 4, classes, 1)
        he_init(self)
        self.up4 = _upsample(classes, 2)
        self.up3 = _upsample(classes, 2)
        self.up = _upsample(classes, 8)

    def blocks(self) -> list[nn.Module]:
        """The stages of the trunk and the convolutional classifier."""
        return [*self.stages, self.classifier]

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes, height, width)."""
        pools: list[Tensor] = []
        for stage in self.stages:
            x = stage(x)
            pools.append(x)
        scores = self.score(self.classifier(x))
        scores = self.up4(scores) + self.score4(pools[3])
        scores = self.up3(scores) + self.score3(pools[2])
        logits: Tensor = self.up(scores)
        return logits
