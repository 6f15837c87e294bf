"""Every touch of PyTorch that is not public, as far as the runtime needs it: one place to look after each release."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from recoup.errors import SettingError
from recoup.online import native

if TYPE_CHECKING:
    from recoup.online.calls import View

_BUSY_CYCLES = 600_000
_CAN_EXCHANGE = hasattr(torch.UntypedStorage, "_swap_data_ptr_")

array_of = torch._C.TensorBase.numpy
storage_of = torch._C.TensorBase.untyped_storage
"""A tensor's bytes and its storage, past what :mod:`recoup.online.exposed` puts around the methods.

The storage's Python object lives as long as the storage itself, so what is put on it dies with the storage.
"""


def key_of(storage: torch.UntypedStorage) -> int:
    """The same for two Python objects exactly if they are one storage."""
    return int(storage._cdata)


def has_no_bytes(tensor: torch.Tensor) -> bool:
    """Whether autograd made it for a gradient that is zero, without memory."""
    return tensor._is_zerotensor()


def has_own_operators(kind: type[torch.Tensor]) -> bool:
    """Whether a kind of tensor runs operators itself, on others that it is made of."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


class OperatorMode(TorchDispatchMode):
    """Sees every operator below autograd, in the backward's threads too. Dynamo is told to stay away once, in
    :meth:`recoup.online.runtime.Runtime.__enter__`, not by a wrapper around every call."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def can_exchange() -> bool:
    """Whether two storages can exchange their memory: PyTorch can from 2.13 on, and our C++ part. Else bytes are
    copied."""
    return _CAN_EXCHANGE or native.loaded is not None


def exchange(empty: torch.UntypedStorage, full: torch.UntypedStorage) -> None:
    """Give ``empty`` what ``full`` holds; ``full`` is not used any more. No tensor's version counter moves."""
    if _CAN_EXCHANGE:
        empty._swap_data_ptr_(full)  # type: ignore[attr-defined]
    elif native.loaded is not None:
        native.loaded.exchange(empty, full)
    else:
        empty.resize_(full.nbytes())
        empty.copy_(full)


def fresh_view(storage: torch.UntypedStorage, view: View) -> torch.Tensor:
    """A new tensor over the storage, with a version counter of its own."""
    tensor = torch.empty(0, dtype=view.dtype, device=storage.device)
    return tensor.set_(storage, *view.geometry)  # type: ignore[call-overload]


def pick_device(device: torch.device | str | None) -> torch.device:
    """One device, with its number: the given one, else CUDA's current one, else the CPU."""
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise SettingError(f"device={device!r} is no device: there are 'cuda', 'cuda:1' and so on, and 'cpu'") from None
    if place.type not in ("cpu", "cuda"):
        raise SettingError(f"device={device!r}: only CUDA devices and the CPU are managed")
    if place.type == "cpu":
        return place
    if not torch.cuda.is_available():
        raise SettingError(f"device={device!r}: PyTorch finds no CUDA device here; use device='cpu'")
    return torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)


def keep_busy() -> None:
    """Let the GPU wait for about 0.3 ms, so that what is launched meanwhile runs back to back."""
    torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]


def default_generator(device: torch.device) -> torch.Generator:
    """Where operators on the device draw from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


@contextmanager
def below_autograd() -> Iterator[None]:
    """Run operators as kernels alone: no graph, no casts, no mode sees them."""
    hidden = native.loaded is not None and native.loaded.hide(True)
    try:
        with _disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():  # type: ignore[no-untyped-call]
            yield
    finally:
        if native.loaded is not None:
            native.loaded.hide(hidden)


def describe(func: Any) -> str:
    """An operator's name as people know it."""
    return f"{func.namespace}.{func.overloadpacket.__name__}"
