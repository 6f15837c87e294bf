"""Copies that no count of live storages sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Hidden:
    """A tensor's contents outside PyTorch, where they count for no device."""

    dtype: torch.dtype
    shape: torch.Size
    contents: NDArray[Any]

    @staticmethod
    def of(tensor: Tensor) -> Hidden:
        """A copy of the tensor's contents."""
        flat = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous().reshape(-1)
        return Hidden(tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().copy())

    def tensor(self, device: torch.device) -> Tensor:
        """A new tensor with these contents."""
        if not self.contents.size:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.from_numpy(self.contents.copy()).view(self.dtype).reshape(self.shape).to(device)
