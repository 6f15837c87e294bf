"""The fall-back cost model: FLOPs and bytes over the device's peak rates.

For what cannot be run alone, and for planning without the device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from recoup.torch.costs import Cost, tensors_of
from recoup.torch.internals.tensors import real_tensors

LAUNCH_SECONDS = 2e-6  # no op takes less
ENOUGH_SECONDS = 0.1  # of measuring one rate: a CPU without half precision takes long for a product in it


@dataclass(frozen=True)
class Rates:
    """What the device reaches at best: bytes moved per second, and floating-point operations per second by dtype."""

    bytes_per_second: float
    flops_per_second: dict[str, float]


ABSENT = Rates(4.3e12, {"torch.float32": 5e13, "torch.bfloat16": 7.9e14, "torch.float16": 7.9e14})
"""For a GPU that is not here: about an NVIDIA H200's. A schedule depends on ratios between ops, not on the clock."""


def measure_rates(device: torch.device) -> Rates:
    """A copy that does not fit any cache, and a matrix product for each dtype that models compute in."""
    size = 2**28 if device.type == "cuda" else 2**24
    side = 4096 if device.type == "cuda" else 256
    with real_tensors(device):
        block = torch.ones(size, dtype=torch.uint8, device=device)
        bandwidth = 2 * size / _seconds(lambda: block.clone(), device)
        rates = {}
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            matrix = torch.ones(side, side, dtype=dtype, device=device)
            rates[str(dtype)] = 2 * side**3 / _seconds(lambda matrix=matrix: matrix @ matrix, device)  # type: ignore[misc]
    return Rates(bandwidth, rates)


def _seconds(run: Any, device: torch.device) -> float:
    times: list[float] = []
    while len(times) < 3 or (len(times) < 5 and sum(times[1:]) < ENOUGH_SECONDS):  # the first warms up
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])  # what else runs on the device makes it slower, nothing makes it faster


def estimate(node: fx.Node, rates: Rates) -> Cost:
    """The slower of moving its bytes and doing its arithmetic."""
    values = [other.meta.get("val") for other in node.all_input_nodes]
    moved = sum(_bytes(tensor) for tensor in tensors_of([*values, node.meta.get("val")]))
    flops, dtype = _flops(node), _dtype(values)
    arithmetic = flops / rates.flops_per_second.get(dtype, rates.flops_per_second["torch.float32"])
    return Cost(max(LAUNCH_SECONDS, moved / rates.bytes_per_second, arithmetic))


def _bytes(tensor: torch.Tensor) -> int:
    return min(int(tensor.numel() * tensor.element_size()), int(tensor.untyped_storage().nbytes()))


def _dtype(values: list[Any]) -> str:
    return next((str(tensor.dtype) for tensor in tensors_of(values) if tensor.is_floating_point()), "torch.float32")


def _flops(node: fx.Node) -> float:
    """PyTorch's own count where it has a formula; 0 elsewhere, which leaves the bytes."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0.0
    args, kwargs = tree_map(
        lambda arg: arg.meta.get("val") if isinstance(arg, fx.Node) else arg, (node.args, node.kwargs)
    )
    try:
        return float(formula(*args, **kwargs, out_val=node.meta.get("val")))
    except (TypeError, ValueError, AssertionError, IndexError, KeyError):
        return 0.0
