"""Numbers that change from call to call: planned once, within the budget, and the same to the last bit."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import recoup
from recoup.errors import RecoupWarning
from recoup.torch import part
from recoup.torch.memory import measure_peak
from tests.torch_helpers import QUICK, assert_same

pytestmark = pytest.mark.usefixtures("one_thread")


def weighted(model, x, t, n):
    """With tensors of any size, with a number that is computed from one, and with a loss."""
    return ((model(x) * t - n).square().sum() * (1 - t) + x.sum() * n / 3 + t) / n


def of_two(model, x, t, n):
    """A number that is computed from two, with a loss, which is a tensor without dimensions."""
    return model(x).sum() * (t * n) + t


def powered(model, x, t, n):
    return (model(x).abs() ** t).sum() + (t / (2 + model(x).abs())).sum() * n


def in_half(model, x, t, n):
    return ((model(x).bfloat16() * t + n) / t).float().sum()


def sliced(model, x, t, n):
    return (model(x)[:n] * t).sum()


def body():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())))


def data():
    return torch.randn(512, 16, generator=torch.Generator().manual_seed(0))


def gradients(function, model, *args):
    model.zero_grad(set_to_none=True)
    loss = function(model, data(), *args)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def traced(target):
    """How often a part was traced."""
    return sum(len(variants) for part in target._recoup_session.parts for variants in part.variants.values())


@pytest.mark.parametrize(("function", "count"), [(weighted, 2), (of_two, 2), (in_half, 2), (powered, 4), (sliced, 4)])
@pytest.mark.filterwarnings("ignore:a number that changes")
def test_the_same_numbers_within_the_budget(cache, function, count):
    model = body()
    planned = recoup.optimize(function, budget=0.9, cache=cache, **QUICK)
    for t, n in ((0.5, 2), (0.6, 3), (0.7, 4), (-0.1, 6)):
        assert_same(gradients(planned, model, t, n), gradients(function, model, t, n))
        model.zero_grad(set_to_none=True)
        peak = measure_peak(lambda t=t, n=n: planned(model, data(), t, n).backward(), torch.device("cpu"))
        assert peak <= recoup.plans(planned)[-1].budget_bytes
    assert traced(planned) == count


@pytest.mark.filterwarnings("ignore:a number that changes")
def test_zero_has_a_sign(cache):
    def signed(model, x, t):
        return torch.copysign(model(x), torch.full((16,), t)).sum()

    model = body()
    planned = recoup.optimize(signed, budget=1.0, cache=cache, **QUICK)
    for t in (0.5, 1.5, 0.0, -0.0):
        assert_same(gradients(planned, model, t), gradients(signed, model, t))


def test_what_is_traced_for_each_value_is_said(cache):
    planned = recoup.optimize(powered, budget=0.9, cache=cache, **QUICK)
    model = body()
    gradients(planned, model, 0.5, 1)
    with pytest.warns(RecoupWarning, match="a number that changes from call to call"):
        gradients(planned, model, 0.6, 1)


def test_a_counter_on_the_module(cache):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.calls = body(), 1

        def forward(self, x):
            self.calls += 1
            return self.body(x) * self.calls

    model = recoup.optimize(Counts(), budget=0.9, cache=cache, **QUICK)
    for call in range(4):
        assert_same(model(data()), model.body(data()) * (call + 2))


def test_another_models_numbers_are_no_change(cache):
    """Dynamo remembers what changes by the name of the code, which is ours for every model."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecoupWarning)
        for eps in (1e-5, 1e-3, 0.1):
            model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16, eps=eps), nn.Tanh(), nn.Linear(16, 16))
            recoup.optimize(model, budget=1.0, cache=cache, **QUICK)(data()[: int(64 / eps**0.1)]).sum().backward()
            assert len(recoup.plans(model)) == 1


def test_compiled(cache):
    model = body()
    planned = recoup.optimize(weighted, budget="1GiB", cache=cache, compile="inductor", time_limit=1)
    for t, n in ((0.5, 2), (0.6, 3), (0.7, 4)):
        ours, theirs = gradients(planned, model, t, n), gradients(weighted, model, t, n)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert traced(planned) == 2


NUMBERS = {
    "numpy": lambda step: (np.float32(0.3), np.float64(0.4), np.int64(2))[step],
    "drawn": lambda step: None,
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_that_are_tensors_to_the_graph(cache, kind):
    def loss(model, x, scale):
        y = torch.tanh(model(x))
        return (x + y * (random.uniform(0.5, 1.5) * random.randint(1, 9) if scale is None else scale)).square().sum()

    model = body()
    planned = recoup.optimize(loss, budget=1.0, cache=cache, **QUICK)
    for step in range(3):
        found = []
        for each in (planned, loss):
            random.seed(step)
            found.append(gradients(each, model, NUMBERS[kind](step)))
        assert_same(*found)


@pytest.mark.filterwarnings("ignore:a number that changes")
def test_what_many_values_leave_is_bounded(cache, monkeypatch):
    monkeypatch.setattr(part, "VARIANTS", 3)
    model = body()
    planned = recoup.optimize(powered, budget=0.9, cache=cache, **QUICK)
    for t in (0.5, 0.6, 0.7, 0.8, 0.9, 0.5):
        assert_same(gradients(planned, model, t, 2), gradients(powered, model, t, 2))
    session = planned._recoup_session
    assert max(len(one.variants) for one in session.parts) == 3
    assert len(session.known[torch.device("cpu")]) <= 2
