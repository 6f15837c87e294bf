"""A training step to run in several ways: the model, its inputs and its loss, and the blocks one would checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recoup.errors import SettingError
from recoup.torch.models import BlockModel
from recoup.torch.nested import moved, tensors_in

SEED = 0
Call = Callable[..., Any]


@dataclass(frozen=True)
class Workload:
    """A model, the inputs of one step (a tensor, a tuple or a dict), and what makes a loss of its output.

    Without a loss the model's output is one if it is a scalar; else the step goes back from the outputs' norms.
    """

    name: str
    model: nn.Module
    inputs: Any
    loss: Callable[[Any], Tensor] | None = None

    def on(self, device: torch.device) -> Workload:
        """The same on ``device``."""
        loss = self.loss.to(device) if isinstance(self.loss, nn.Module) else self.loss
        return replace(self, model=self.model.to(device), inputs=moved(self.inputs, device), loss=loss)

    def target(self, model: nn.Module) -> Call:
        """What is planned: the model, with the loss where there is one."""
        loss = self.loss
        if loss is None:
            return model

        def step(*args: Any, **kwargs: Any) -> Any:
            return loss(model(*args, **kwargs))

        return step

    def leaves(self, model: nn.Module) -> list[Tensor]:
        """Whose gradients one step leaves behind."""
        return [tensor for tensor in (*model.parameters(), *tensors_in(self.inputs)) if tensor.requires_grad]

    def scalar(self, result: Any) -> Tensor:
        """What the step goes back from."""
        tensors = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
        if isinstance(result, Tensor) and result.numel() == 1 and tensors:
            return result.reshape(())
        if self.loss is not None:
            shape = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise SettingError(f"the loss of {self.name} must be a scalar tensor that needs a gradient, not {shape}")
        if not tensors:
            raise SettingError(f"nothing that {self.name} returns needs a gradient, so there is no step to train")
        return torch.stack([torch.linalg.vector_norm(tensor).float() for tensor in tensors]).sum()


def checkpoint_blocks(model: nn.Module) -> None:
    """``torch.utils.checkpoint`` on every block, as a user would put it."""
    for block in blocks(model):
        block.forward = partial(_checkpointed, block.forward)


def _checkpointed(forward: Call, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def blocks(model: nn.Module) -> list[nn.Module]:
    """What one would checkpoint by hand: a built-in model's own list, else the longest sequence of modules in it."""
    if isinstance(model, BlockModel):
        return model.blocks()
    runs: list[list[nn.Module]] = [
        list(module.children())
        for module in model.modules()
        if isinstance(module, nn.Sequential | nn.ModuleList)
        and not any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in module.children())
    ]
    longest = max(runs, key=len, default=[])
    return longest if len(longest) > 1 else []
