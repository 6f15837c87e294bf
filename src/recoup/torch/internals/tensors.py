"""What recoup asks of tensors, operators and the process, graphs aside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from recoup.errors import CaptureError


def count_writes(tensor: torch.Tensor) -> int:
    """How often the tensor was written to in place; one made in inference mode never is, outside of it."""
    return 0 if tensor.is_inference() else tensor._version


def allocated_and_released(recorded: torch.autograd.profiler.profile) -> list[int]:
    """Bytes that the allocator handed out, or took back if negative, in order of time."""
    found: Any = recorded.kineto_results
    events = [event for event in found.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def is_made_of_others(func: Any) -> bool:
    """Whether an operator has no kernel of its own, such as ``reshape``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@contextmanager
def real_tensors(device: torch.device) -> Iterator[None]:
    """Leave fake-tensor, proxy and autocast modes, and keep the random state, to run operators while tracing."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableAutocast())  # type: ignore[no-untyped-call]
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"))
        yield


def float32_precisions() -> list[str]:
    """How exactly float32 is computed; the public settings of old cannot be read once the new ones have been used."""
    precision = torch._C._get_fp32_precision_getter
    return [precision(library, kind) for library in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")]


def is_profiled() -> bool:
    """Whether one of PyTorch's profilers runs, in any thread; there can only be one."""
    return bool(torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled)


def is_open(profiler: torch.autograd.profiler.profile) -> bool:
    """Whether it has begun and not ended; one that is warming up does not count as running."""
    return bool(getattr(profiler, "entered", False) and profiler.kineto_results is None)  # one switched off has neither


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor only describes one, or stands for one, while a program is traced; some outlive that."""
    return isinstance(tensor, FakeTensor | FunctionalTensor) or torch._is_functional_tensor(tensor)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in memory itself.

    Not a sparse one, nor what a ``torch.func`` transform or a subclass wraps, nor a parameter that has no shape yet.
    """
    if not torch._C._has_storage(tensor):
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except Exception:  # a subclass may refuse in any way
        return False
    return True


def subclasses_aside() -> AbstractContextManager[None]:
    """Ask tensors of any class as tensors: a class may refuse to say even where it is."""
    return torch._C.DisableTorchFunctionSubclass()


def storage_key(tensor: torch.Tensor) -> int:
    """The same for two tensors exactly if they share a storage (also for the fake tensors of a traced graph)."""
    if tensor.layout != torch.strided:
        raise CaptureError(
            f"the step makes a tensor of layout {tensor.layout}, which cannot be planned; an embedding with "
            "sparse=False has a dense gradient"
        )
    return int(tensor.untyped_storage()._cdata)
