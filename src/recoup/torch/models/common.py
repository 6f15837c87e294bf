"""What several models share: the promise to list their blocks, convolutions with batch norm, how they start, a loss."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class BlockModel(nn.Module):
    """A model that can say which parts one would checkpoint by hand, so that benchmarks can compare with that."""

    def blocks(self) -> list[nn.Module]:
        """The repeated parts in the order in which they run. Each is called with positional tensors."""
        raise NotImplementedError


def conv_norm_relu(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, activation: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """A convolution that keeps the size (but for its stride), batch norm instead of a bias, and an in-place ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        activation(inplace=True),
    )


def he_init(model: nn.Module) -> None:
    """Keep the signal's scale through deep stacks of ReLUs; needed where no batch norm restores it."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def normal_init(model: nn.Module, std: float = 0.02) -> None:
    """Small normal weights and no biases, as GPT-2 and its successors start."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def logits_or_loss(logits: Tensor, targets: Tensor | None) -> Tensor:
    """The logits, or, when targets are given, their mean cross entropy over all positions."""
    if targets is None:
        return logits
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
