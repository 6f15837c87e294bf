"""Which storages are known, and what each of them holds now."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from recoup.online.adapter import has_no_bytes, key_of, storage_of
from recoup.online.calls import Call
from recoup.online.contents import Content, Holder, Owner
from recoup.torch.memory import allocated_size

_HOLDER = "_recoup_holder"
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


class Register:
    """Storages of one device, each with a holder on it that names its content and tells the owner when it dies."""

    def __init__(self, device: torch.device, owner: Owner) -> None:
        self.device = device
        self._owner = owner
        self._allocated: dict[int, int] = {}

    def find(self, tensor: torch.Tensor) -> Content | None:
        """What the tensor's storage holds, if it is known."""
        return None if tensor.layout != torch.strided else self.find_in(storage_of(tensor))

    def find_in(self, storage: torch.UntypedStorage) -> Content | None:
        """What a storage holds, if it is known."""
        holder = self._holder(storage)
        return None if holder is None else holder.content

    def is_managed(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is one to look after: on the device, and of a plain tensor."""
        return (
            type(tensor) in _PLAIN
            and tensor.device == self.device
            and tensor.layout == torch.strided
            and not tensor.is_quantized
            and not tensor.is_nested
            and not has_no_bytes(tensor)
        )

    def new_storages(self, tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
        """The storages of ``tensors`` that are to be looked after and that nobody knows yet, each once."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            if self.is_managed(tensor):
                storage = storage_of(tensor)
                if self._holder(storage) is None:
                    found[key_of(storage)] = storage
        return list(found.values())

    def begin(self, storage: torch.UntypedStorage, call: Call | None, size: int | None = None) -> Content:
        """A new content in a storage, in place of the one that it had; of ``size`` bytes, which may be away."""
        bytes_ = storage.nbytes() if size is None else size
        content = Content(self.size_of(bytes_), key_of(storage), storage, call, self._owner)
        holder = self._holder(storage)
        if holder is None:
            storage.__dict__[_HOLDER] = Holder(content, self._owner)
        else:
            holder.content = content
        return content

    def begin_without(self, key: int, size: int, call: Call | None) -> Content:
        """A content in a storage that is no more."""
        content = Content(self.size_of(size), key, None, call, self._owner)
        content.resident = False
        return content

    def size_of(self, size: int) -> int:
        """Bytes that a storage of this size counts for."""
        allocated = self._allocated.get(size)
        if allocated is None:
            allocated = self._allocated[size] = allocated_size(size, self.device)
        return allocated

    def _holder(self, storage: torch.UntypedStorage) -> Holder | None:
        """Ours: an earlier block may have left one behind."""
        holder: Holder | None = storage.__dict__.get(_HOLDER)
        return holder if holder is not None and holder.owner is self._owner else None
