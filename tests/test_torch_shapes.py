"""A new shape gets a plan of its own, and an old one its old plan."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.torch import planning
from recoup.torch.memory import measure_peak
from tests.torch_helpers import QUICK, assert_same, images, net, state, tight

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::recoup.RecoupWarning"),
]


class TestShapes:
    def test_a_new_shape_and_back(self, cache):
        model = net(dropout=0.1, norm=True)
        plain = copy.deepcopy(model)
        shapes = [(4, 16), (6, 16), (4, 16), (3, 20), (6, 16), (4, 16)]
        inputs = {shape: images(*shape) for shape in shapes}
        recoup.optimize(model, budget=tight(model, inputs[4, 16], 0.5, cache, 0.1), cache=cache, **QUICK)
        plans: dict[Any, Any] = {}
        for shape in shapes:
            for each in (plain, model):
                each.zero_grad(set_to_none=True)
                torch.manual_seed(1)
                each(inputs[shape]).square().sum().backward()
            assert_same(state(model), state(plain), f"{shape}")
            (plans[shape],) = recoup.plans(model)[-1:]
        assert len({plan.graph.fingerprint for plan in plans.values()}) == 3

    def test_a_last_smaller_batch(self, cache):
        model = net(norm=True)
        plain = copy.deepcopy(model)
        data = [images(4), images(4), images(2)]
        recoup.optimize(model, budget=tight(model, data[0], 0.5, cache, 0.1), cache=cache, **QUICK)
        for _ in range(2):
            for x in data:
                for each in (plain, model):
                    each.zero_grad(set_to_none=True)
                    each(x).square().sum().backward()
                assert_same(state(model), state(plain))

    def test_many_shapes(self, cache):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        plain = copy.deepcopy(model)
        recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
        for batch in range(1, 13):
            x = torch.randn(batch, 8)
            for each in (plain, model):
                each.zero_grad(set_to_none=True)
                each(x).square().sum().backward()
            assert_same(state(model), state(plain), f"batch {batch}")

    def test_an_empty_batch(self, cache):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        plain = copy.deepcopy(model)
        recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
        for batch in (4, 0, 4):
            x = torch.randn(batch, 8)
            for each in (plain, model):
                each.zero_grad(set_to_none=True)
                each(x).square().sum().backward()
            assert_same(state(model), state(plain), f"batch {batch}")

    def test_other_strides(self, cache):
        model = net(norm=True)
        plain = copy.deepcopy(model)
        recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
        x = images()
        for given in (x, x.to(memory_format=torch.channels_last), x.transpose(2, 3), x[:, :, ::2]):
            for each in (plain, model):
                each.zero_grad(set_to_none=True)
                each(given).square().sum().backward()
            assert_same(state(model), state(plain))


def test_workspaces_of_other_arguments_are_not_taken_over(cache):
    """A convolution without dilation takes another way, which unfolds its input."""

    class Dilated(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 3, 3, 3, dtype=torch.float64))

        def forward(self, x, dilation):
            return torch.nn.functional.conv2d(x, self.weight, padding=dilation, dilation=dilation).square()

    model, cpu = Dilated(), torch.device("cpu")
    recoup.optimize(model, budget="64MiB", cache=cache, **QUICK)
    for batch, dilation in ((4, 2), (6, 2), (16, 2), (16, 3), (16, 1)):
        x = torch.randn(batch, 3, 32, 32, dtype=torch.float64)
        model.zero_grad(set_to_none=True)
        model(x, dilation).sum().backward()
        model.zero_grad(set_to_none=True)
        peak = measure_peak(lambda x=x, dilation=dilation: model(x, dilation).sum().backward(), cpu)
        assert peak <= recoup.plans(model)[-1].peak_bytes


@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_the_largest_that_is_marked_is_planned_first(cache, monkeypatch, mode):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.Tanh())))
    plain = copy.deepcopy(model)
    large, small = torch.randn(512, 32), torch.randn(64, 32)
    fraction = tight(model, large, 0.6, cache, 0.02)
    peak = measure_peak(lambda: plain(large).square().mean().backward(), torch.device("cpu"))
    plain.zero_grad(set_to_none=True)
    recoup.optimize(model, budget=int(fraction * peak) + 4096, cache=cache, **{**QUICK, "compile": mode})
    torch._dynamo.mark_dynamic(small, 0, min=2, max=512)
    searched = []
    solve = planning.solve

    def search(graph, *args, **named):
        searched.append(graph)
        return solve(graph, *args, **named)

    monkeypatch.setattr(planning, "solve", search)
    for x in (small, large, small):
        for each in (plain, model):
            each.zero_grad(set_to_none=True)
            each(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        if x is small:
            seen = len(searched)
    assert searched
    assert len(searched) == seen
    assert all(any(value.bytes == large.nbytes for value in graph.values) for graph in searched)


def test_a_largest_that_does_not_fit_is_refused_at_once(cache):
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)), torch.randn(64, 32)
    recoup.optimize(model, budget="500KiB", cache=cache, **QUICK)
    model(x).sum().backward()
    recoup.optimize(model, budget="500KiB", cache=cache, **QUICK)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=2**16)
    for _ in range(2):
        with pytest.raises(recoup.BudgetError, match=r"a budget of 500 KiB is not enough.* marked: \(65536, 32\)"):
            model(x)


def test_the_largest_is_laid_out_as_what_is_given(cache):
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(30, 4)

        def forward(self, x):
            return self.layer(x.flatten(1))

    model = Flat()
    plain = copy.deepcopy(model)
    recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
    for batch in (4, 8, 8):
        x = torch.randn(batch, 6, 5).transpose(1, 2)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=8)
        for each in (plain, model):
            each.zero_grad(set_to_none=True)
            each(x).square().sum().backward()
        assert_same(state(model), state(plain))
