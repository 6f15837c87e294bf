"""Gradients that autograd would copy before it keeps them: copied by the plan, which counts them."""

import gc
import weakref

import pytest
import torch
from torch import nn

import recoup
from recoup.torch.memory import measure_peak
from tests.torch_helpers import QUICK, assert_same

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


class Net(nn.Module):
    """Two parameters and what is done with them."""

    def __init__(self, first, second, function):
        super().__init__()
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)
        self.function = function

    def forward(self, x):
        return self.function(x, self.first, self.second)


CASES = {
    "kept as they are": lambda x, a, b: (torch.tanh(x @ a) @ b).sum(),
    "slices of one": lambda x, a, b: torch.tanh(x @ torch.cat([a, b], 1)).sum(),
    "the same twice": lambda x, a, b: torch.tanh(x @ (a + b)).sum(),
    "expanded": lambda x, a, b: torch.tanh(x @ a).sum() + b.sum(),
    "transposed": lambda x, a, b: torch.tanh(a.t().contiguous() @ x.t()).sum() + b.mean(),
    "odd layouts": lambda x, a, b: torch.tanh(a.permute(1, 0, 2).contiguous()).sum() + (b.contiguous() * x[0, 0]).sum(),
}


def network(kind):
    torch.manual_seed(0)
    first, second = torch.randn(256, 256), torch.randn(256, 256)
    if kind == "odd layouts":
        first = torch.randn(64, 32, 16).permute(2, 0, 1)
        second = torch.randn(8, 4, 32, 32).to(memory_format=torch.channels_last)
    return Net(first, second, CASES[kind])


def gradients(model, x):
    model.zero_grad(set_to_none=True)
    model(x).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("kind", CASES)
def test_they_are_counted(cache, kind):
    model, x = network(kind), torch.randn(64, 256)
    theirs = gradients(model, x)
    strides = [gradient.stride() for gradient in theirs]
    recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
    ours = gradients(model, x)
    assert_same(ours, theirs)
    assert [gradient.stride() for gradient in ours] == strides
    del ours, theirs
    model.zero_grad(set_to_none=True)
    recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
    gradients(model, x)
    model.zero_grad(set_to_none=True)
    (plan,) = recoup.plans(model)
    assert measure_peak(lambda: model(x).backward(), CPU) == plan.peak_bytes <= plan.budget_bytes


def test_accumulated_ones_are_the_same(cache):
    model, x = network("slices of one"), torch.randn(64, 256)
    results = []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        for _ in range(3):
            model(x).backward()
        results.append([parameter.grad.clone() for parameter in model.parameters()])
        recoup.optimize(model, budget="1GiB", cache=cache, **QUICK)
    assert_same(*results)


def test_compiled_ones_are_counted_and_nothing_is_held(cache):
    def train():
        model, x = network("slices of one"), torch.randn(64, 256)
        gradients(model, x)
        model.zero_grad(set_to_none=True)
        budget = int(1.1 * measure_peak(lambda: model(x).backward(), CPU))
        model.zero_grad(set_to_none=True)
        recoup.optimize(model, budget=budget, cache=cache, compile="inductor", time_limit=1)
        gradients(model, x)
        model.zero_grad(set_to_none=True)
        assert measure_peak(lambda: model(x).backward(), CPU) <= budget
        return weakref.ref(x)

    given = train()
    torch._dynamo.reset()
    gc.collect()
    assert given() is None  # Inductor holds on to its partitioner for good


def test_inputs_are_not_held_while_the_model_lives(cache):
    model = recoup.optimize(network("kept as they are"), budget=1.0, cache=cache, **QUICK)
    x = torch.randn(64, 256)
    gradients(model, x)
    given = weakref.ref(x)
    del x
    assert given() is None  # PyTorch holds on to what it is given to partition graphs with


def test_sparse_ones_are_refused(cache):
    model = nn.Sequential(nn.Embedding(64, 16, sparse=True), nn.Linear(16, 16))
    recoup.optimize(model, budget=0.9, cache=cache, **QUICK)
    with pytest.raises(recoup.CaptureError, match=r"layout torch.sparse_coo, which cannot be planned"):
        model(torch.arange(8))
