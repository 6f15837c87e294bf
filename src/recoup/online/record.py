"""``recoup.record``: what a PyTorch program does, written down as a log that the simulator replays."""

from __future__ import annotations

import gzip
import time
from pathlib import Path
from typing import Any

import torch

from recoup.files import check_writable, write_bytes
from recoup.online import logs
from recoup.online.adapter import OperatorMode, describe, key_of, pick_device, storage_of
from recoup.online.calls import flat_tensors
from recoup.online.operators import Traits, read_traits, written_tensors

_NAME = "_recoup_name"


class _Name:
    """Sits on a storage and notes when the program lets go of it."""

    __slots__ = ("recorder", "text")

    def __init__(self, text: str, recorder: Recorder) -> None:
        self.text = text
        self.recorder = recorder

    def __del__(self) -> None:
        self.recorder.release(self.text)


class Recorder(OperatorMode):
    """One ``with recoup.record(...)`` block. Names are storages: a view is its base, and needs no line."""

    def __init__(self, path: str | Path, device: torch.device) -> None:
        super().__init__()
        self._path = Path(path)
        check_writable(self._path)
        self._device = device
        self._traits: dict[Any, Traits] = {}
        self._items: list[logs.Instruction] = [logs.Annotate("START")]
        self._count = 0
        self._open = False

    def __enter__(self) -> Recorder:
        self._open = True
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        """Write the log, also of a program that failed or was interrupted."""
        super().__exit__(*problem)
        self._open = False
        text = "".join(f"{line}\n" for line in logs.format_log(self._items)).encode()
        write_bytes(self._path, gzip.compress(text) if self._path.suffix == ".gz" else text)

    def release(self, name: str) -> None:
        """A storage died."""
        if self._open:
            self._items.append(logs.Release(name))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operator of the program."""
        kwargs = kwargs or {}
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = read_traits(func, self._device)
        given = list(dict.fromkeys(filter(None, map(self._name, flat_tensors((args, tuple(kwargs.values())), [])))))
        written = [*written_tensors(traits, args, kwargs), *traits.updated(args)]
        changed = dict.fromkeys(filter(None, map(self._name, written)))
        start = time.perf_counter_ns()
        result = func(*args, **kwargs)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        took = time.perf_counter_ns() - start
        fresh = {key_of(storage_of(one)): one for one in flat_tensors((result,), []) if self._is_new(one)}
        if fresh:
            names = tuple(self._begin(storage_of(tensor)) for tensor in fresh.values())
            sizes = tuple(storage_of(tensor).nbytes() for tensor in fresh.values())
            self._items.append(logs.Call(describe(func), tuple(given), names, sizes, (-1,) * len(names), took))
        if changed:
            places = tuple(given.index(name) for name in changed)
            self._items.append(logs.Mutate(describe(func), tuple(given), places, 0 if fresh else took))
        return result

    def _is_new(self, tensor: torch.Tensor) -> bool:
        if not self._is_managed(tensor):
            return False
        holder = storage_of(tensor).__dict__.get(_NAME)
        return holder is None or holder.recorder is not self

    def _is_managed(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._device and tensor.layout == torch.strided

    def _name(self, tensor: torch.Tensor) -> str | None:
        """The name of the tensor's storage; one that was there before is a constant. None without a storage here."""
        if not self._is_managed(tensor):
            return None
        storage = storage_of(tensor)
        if self._is_new(tensor):
            name = self._begin(storage)
            self._items.append(logs.Constant(name, storage.nbytes()))
            return name
        return str(storage.__dict__[_NAME].text)

    def _begin(self, storage: torch.UntypedStorage) -> str:
        name = f"s{self._count}"
        self._count += 1
        storage.__dict__[_NAME] = _Name(name, self)
        return name


def record(path: str | Path, *, device: torch.device | str | None = None) -> Recorder:
    """Record what a program does on a device (CUDA where there is one), in the format of the published logs::

        with recoup.record("step.log.gz"):
            criterion(model(x), y).backward()

    and then ``recoup dtr step.log.gz --budget 0.5``. Times are nanoseconds; on CUDA every operator is waited for.
    """
    return Recorder(path, pick_device(device))
