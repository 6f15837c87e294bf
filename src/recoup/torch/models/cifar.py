"""The deep ResNets for CIFAR (He et al., 2016, section 4.2): 6n + 2 layers of 16, 32 and 64 channels."""

from __future__ import annotations

from torch import Tensor, nn

from recoup.errors import SettingError
from recoup.torch.models.common import BlockModel, conv_norm_relu
from recoup.torch.models.resnet import Residual


def basic(inputs: int, outputs: int, stride: int) -> Residual:
    """Two 3x3 convolutions."""
    body = nn.Sequential(
        conv_norm_relu(inputs, outputs, 3, stride),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
    )
    return Residual(body, inputs, outputs, stride)


class CifarResNet(BlockModel):
    """ResNet-20 unless ``depth`` (20, 32, 44, 56, 110, 1202: 6n + 2) says otherwise."""

    def __init__(self, depth: int = 20, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise SettingError(f"depth {depth}: a ResNet for CIFAR has 6n + 2 layers: 20, 32, 44, 56, 110, 1202")
        self.stem = conv_norm_relu(3, width, 3)
        self.basics = nn.ModuleList()
        channels = width
        for stage in range(3):
            for i in range((depth - 2) // 6):
                outputs = width * 2**stage
                self.basics.append(basic(channels, outputs, 2 if stage > 0 and i == 0 else 1))
                channels = outputs
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))

    def blocks(self) -> list[nn.Module]:
        """The basic blocks."""
        return list(self.basics)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes)."""
        x = self.stem(x)
        for block in self.basics:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits
