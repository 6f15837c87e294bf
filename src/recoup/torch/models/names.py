"""Models by name, each in two sizes: small for tests, full as people train it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from recoup.errors import SettingError
from recoup.torch.models.common import BlockModel
from recoup.torch.models.densenet import DenseNet
from recoup.torch.models.fcn import FCN8
from recoup.torch.models.googlenet import GoogLeNet
from recoup.torch.models.gpt import GPT
from recoup.torch.models.llama import Llama
from recoup.torch.models.lstm import LSTM
from recoup.torch.models.mobilenet import MobileNet, MobileNetV2
from recoup.torch.models.resnet import ResNet
from recoup.torch.models.segnet import SegNet
from recoup.torch.models.unet import UNet
from recoup.torch.models.vgg import VGG, VGG19
from recoup.torch.models.vit import ViT

Task = Literal["classify", "segment", "language"]
SizeName = Literal["small", "full"]


@dataclass(frozen=True, slots=True)
class Size:
    """What one step trains on: the batch, the shape of one sample, how many classes (or words), and the arguments
    beside these that make a model of this size."""

    batch: int
    shape: tuple[int, ...]
    classes: int
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    """A named model; ``make`` takes a size's arguments, ``task`` says what its inputs and its loss are."""

    name: str
    make: Callable[..., BlockModel]
    task: Task
    small: Size
    full: Size

    def build(self, size: SizeName) -> BlockModel:
        """The model alone, on the default device: `with torch.device("meta")` it costs nothing."""
        spec = self.size(size)
        count = {"vocabulary" if self.task == "language" else "classes": spec.classes}
        return self.make(**count, **spec.arguments)

    def size(self, size: SizeName) -> Size:
        """What ``small`` or ``full`` stands for."""
        if size not in ("small", "full"):
            raise SettingError(f"size {size!r} of model {self.name}: say 'small' or 'full'")
        return self.small if size == "small" else self.full


@dataclass(frozen=True, slots=True)
class Example:
    """One training step to try things on: ``loss(model(*inputs)).backward()``."""

    model: BlockModel
    inputs: tuple[Tensor, ...]
    loss: Callable[[Any], Tensor]


def _images(name: str, make: Callable[..., BlockModel], full: int, small: Mapping[str, Any], **arguments: Any) -> Model:
    """A classifier of ImageNet's 224x224 images, and a small one of 32x32; ``full`` is the batch."""
    return Model(name, make, "classify", Size(8, (3, 32, 32), 10, small), Size(full, (3, 224, 224), 1000, arguments))


def _maps(name: str, make: Callable[..., BlockModel], full: int, classes: int, small: Mapping[str, Any]) -> Model:
    """A segmentation model at Checkmate's 416x608, and a small one at 32x64; ``full`` is the batch."""
    return Model(name, make, "segment", Size(2, (3, 32, 64), 5, small), Size(full, (3, 416, 608), classes, {}))


_TINY_VGG = {"width": 4, "hidden": 64, "image": 32}
_TINY_DENSE = {"growth": 4}

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        _images("vgg16", VGG, 128, _TINY_VGG),
        _images("vgg19", VGG, 128, {"convs": VGG19, **_TINY_VGG}, convs=VGG19),
        _images("resnet50", ResNet, 184, {"width": 4}),
        _images("mobilenet", MobileNet, 256, {"width": 0.125}),
        _images("mobilenet-v2", MobileNetV2, 272, {"width": 0.125}),
        _images("googlenet", GoogLeNet, 320, {"width": 0.125}),
        _images("densenet121", DenseNet, 128, {"layers": (2, 2, 3, 2), **_TINY_DENSE}),
        _images(
            *("densenet161", DenseNet, 64, {"layers": (2, 2, 5, 3), **_TINY_DENSE}),
            layers=(6, 12, 36, 24),
            growth=48,
        ),
        _maps("unet", UNet, 11, 2, {"width": 4}),
        _maps("fcn8", FCN8, 16, 21, {"width": 4, "hidden": 32}),
        _maps("segnet", SegNet, 16, 21, {"width": 4}),
        _images("vit", ViT, 128, {"image": 32, "patch": 8, "layers": 4, "width": 32, "heads": 4, "hidden": 128}),
        Model(
            *("gpt", GPT, "language"),
            small=Size(4, (32,), 64, {"length": 32, "layers": 4, "width": 32, "heads": 4}),
            full=Size(8, (1024,), 50304, {"layers": 24, "width": 1024, "heads": 16, "dropout": 0.0}),
        ),
        Model(
            *("llama", Llama, "language"),
            small=Size(4, (32,), 64, {"layers": 4, "width": 32, "heads": 4, "groups": 2, "hidden": 96}),
            full=Size(4, (2048,), 32000, {}),
        ),
        Model(
            *("lstm", LSTM, "language"),
            small=Size(4, (6,), 64, {"width": 32, "dropout": 0.2}),
            full=Size(128, (35,), 10000, {}),
        ),
    )
}


def example(
    name: str, size: SizeName = "small", batch: int | None = None, device: torch.device | str = "cpu"
) -> Example:
    """A model in training mode with random inputs and targets, all made on ``device``.

    Weights and data come from torch's global generator: seed it with `torch.manual_seed` to get the same again.
    """
    if name not in MODELS:
        raise SettingError(f"no model is named {name!r}; known: {', '.join(MODELS)}")
    model = MODELS[name]
    spec = model.size(size)
    batch = spec.batch if batch is None else batch
    if batch < 1:
        raise SettingError(f"batch {batch} for model {name}: it must be at least 1")
    with torch.device(device):
        module = model.build(size)
        if model.task == "language":
            tokens = torch.randint(spec.classes, (batch, spec.shape[0] + 1))
            return Example(module, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), _itself)
        images = torch.randn(batch, *spec.shape)
        targets = torch.randint(spec.classes, (batch, *spec.shape[1:]) if model.task == "segment" else (batch,))
        return Example(module, (images,), partial(functional.cross_entropy, target=targets))


def _itself(loss: Tensor) -> Tensor:
    """Language models return their loss themselves."""
    return loss
