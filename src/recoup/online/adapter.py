"""Every touch of PyTorch that is not public, as far as the runtime needs it: one place to look after each release."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["CAN_EXCHANGE", "TorchDispatchMode", "below_autograd", "exchange", "fresh_view", "storage_of"]

storage_of = torch._C.TensorBase.untyped_storage
"""A tensor's storage, past what :mod:`recoup.online.exposed` puts around the method of that name."""

CAN_EXCHANGE = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""Whether two storages can exchange their memory (torch 2.13); before that the bytes are copied."""


def exchange(empty: torch.UntypedStorage, full: torch.UntypedStorage) -> None:
    """Give ``empty`` what ``full`` holds; ``full`` is not used any more. No tensor's version counter moves."""
    if CAN_EXCHANGE:
        empty._swap_data_ptr_(full)  # type: ignore[attr-defined]
        return
    empty.resize_(full.nbytes())
    empty.copy_(full)


def fresh_view(storage: torch.UntypedStorage, dtype: torch.dtype, geometry: tuple[Any, ...]) -> torch.Tensor:
    """A new tensor over the storage, with a version counter of its own. ``geometry`` is offset, size and stride."""
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, *geometry)  # type: ignore[call-overload, no-any-return]


@contextmanager
def below_autograd() -> Iterator[None]:
    """Run operators as kernels alone: no graph, no casts, no mode sees them."""
    with _disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():  # type: ignore[no-untyped-call]
        yield
