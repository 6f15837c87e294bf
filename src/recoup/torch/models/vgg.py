"""VGG (Simonyan and Zisserman, 2015): stages of 3x3 convolutions, then three large linear layers with dropout."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from recoup.torch.models.common import BlockModel, he_init

VGG16 = (2, 2, 3, 3, 3)
VGG19 = (2, 2, 4, 4, 4)


def _channels(width: int, stage: int) -> int:
    """What a stage gives out: twice as many channels as the one before, up to eight times ``width``."""
    return width * min(2**stage, 8)


def vgg_stages(convs: Sequence[int], width: int) -> nn.ModuleList:
    """The stages, each of ``convs[i]`` convolutions with ReLU and a halving of the size; FCN8 stands on them too."""
    stages = nn.ModuleList()
    channels = 3
    for i, count in enumerate(convs):
        outputs = _channels(width, i)
        layers: list[nn.Module] = []
        for _ in range(count):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            channels = outputs
        stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
    return stages


class VGG(BlockModel):
    """VGG16 unless ``convs`` says otherwise; the classifier fits square images of ``image`` pixels."""

    def __init__(
        self,
        convs: Sequence[int] = VGG16,
        width: int = 64,
        hidden: int = 4096,
        classes: int = 1000,
        image: int = 224,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.stages = vgg_stages(convs, width)
        side = image // 2 ** len(convs)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(_channels(width, len(convs) - 1) * side * side, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )
        he_init(self)

    def blocks(self) -> list[nn.Module]:
        """The stages; the classifier keeps next to nothing."""
        return list(self.stages)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes)."""
        for stage in self.stages:
            x = stage(x)
        logits: Tensor = self.classifier(x)
        return logits
