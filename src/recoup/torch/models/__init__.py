"""Models to plan and to measure, written from their papers: any size, from a test's to the one people train."""

from recoup.torch.models.cifar import CifarResNet
from recoup.torch.models.common import BlockModel
from recoup.torch.models.densenet import DenseNet
from recoup.torch.models.fcn import FCN8
from recoup.torch.models.googlenet import GoogLeNet
from recoup.torch.models.gpt import GPT
from recoup.torch.models.llama import Llama
from recoup.torch.models.lstm import LSTM
from recoup.torch.models.mobilenet import MobileNet, MobileNetV2
from recoup.torch.models.names import MODELS, Example, Model, Size, example
from recoup.torch.models.resnet import ResNet
from recoup.torch.models.segnet import SegNet
from recoup.torch.models.unet import UNet
from recoup.torch.models.vgg import VGG
from recoup.torch.models.vit import ViT

__all__ = [
    "FCN8",
    "GPT",
    "LSTM",
    "MODELS",
    "VGG",
    "BlockModel",
    "CifarResNet",
    "DenseNet",
    "Example",
    "GoogLeNet",
    "Llama",
    "MobileNet",
    "MobileNetV2",
    "Model",
    "ResNet",
    "SegNet",
    "Size",
    "UNet",
    "ViT",
    "example",
]
