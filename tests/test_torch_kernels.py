"""When Inductor's kernels run, and what they hold. None is compiled here: numbers mean nothing, and memory is true."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile

import recoup
from recoup.torch import compiled, internals
from tests.torch_helpers import QUICK, repeats

pytestmark = pytest.mark.usefixtures("one_thread", "nothing_compiled")

COMPILED = {**QUICK, "compile": "inductor"}


@pytest.fixture
def nothing_compiled(monkeypatch):
    """Kernels that do nothing."""
    for name in ("cpp", "cpp_pybinding"):
        monkeypatch.setattr(AsyncCompile, name, lambda *_args, **_options: lambda *_given: None)
    with inductor_config.patch(force_disable_caches=True, layout_optimization=False):
        yield


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


class Adds(nn.Module):
    """A chain of sums."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(x)


def test_what_is_made_again_is_not_fused_across_places(tmp_path, monkeypatch):
    """Inductor would make the whole chain again in one kernel, and hold all of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Adds(64) for _ in range(6)))
    seen: list[list[tuple[int, int, bool]]] = []
    in_order = internals._InOrder.__call__

    def look(self, nodes):
        seen.extend(map(internals._places, nodes))
        return in_order(self, nodes)

    monkeypatch.setattr(internals._InOrder, "__call__", look)
    recoup.optimize(model, budget=0.75, cache=tmp_path, **COMPILED)
    step(model, torch.randn(512, 64))
    assert repeats(model) > 0
    kept = [places for places in seen if any(fixed for _, _, fixed in places)]
    assert len({first for places in kept for first, _, _ in places}) > 1  # there are several places
    for places in kept:  # and no kernel is at two
        assert max(first for first, _, _ in places) <= min(last for _, last, _ in places)


def convs(inputs: int, outputs: int) -> nn.Sequential:
    def one(given: int) -> list[nn.Module]:
        return [nn.Conv2d(given, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(*one(inputs), *one(outputs))


class Skips(nn.Module):
    """A small U-Net: what it concatenates is read elsewhere, too, and the gradient of a bias sums up a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom, self.after = convs(3, 8), convs(8, 16), convs(16, 8)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        inside = self.bottom(nn.functional.avg_pool2d(skip, 2))
        return self.after(torch.cat([skip, self.up(inside)], dim=1))


@pytest.mark.parametrize("share", [0.6, 0.75])
def test_the_first_prediction_is_right(tmp_path, monkeypatch, share):
    torch.manual_seed(0)
    model = Skips()
    tried: list[compiled._Tried] = []
    try_out = compiled._try_out

    def remember(*args):
        tried.append(try_out(*args))
        return tried[-1]

    monkeypatch.setattr(compiled, "_try_out", remember)
    recoup.optimize(model, budget=share, cache=tmp_path, **COMPILED)
    step(model, torch.randn(8, 3, 96, 96))
    assert repeats(model) > 0
    assert tried[0].peak_bytes == pytest.approx(tried[0].step.plan.peak_bytes, rel=0.001)


def test_what_only_the_backward_reads_is_made_when_it_does(tmp_path):
    """The indices of a pool's maxima are in the forward's trace."""
    torch.manual_seed(0)
    model = nn.Sequential(convs(3, 8), nn.MaxPool2d(2), convs(8, 8))
    graph = recoup.plan(model, (torch.randn(4, 3, 32, 32),), budget=0.9, cache=tmp_path, **COMPILED).graph
    names = [op.id for op in graph.ops]
    indices = names.index("_low_memory_max_pool_offsets_to_indices")
    assert set(graph.ops[indices].outputs) <= set(graph.ops[indices + 1].inputs)
    assert indices > names.index("tangents") + 1
