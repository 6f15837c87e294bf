"""What goes in and what comes out, in any container, and every loss that is made of it, to the last bit."""

import copy
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

import recoup
from tests.torch_helpers import QUICK, assert_same, check, images, net, state, tight

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::recoup.RecoupWarning"),
]

Pair = namedtuple("Pair", ["first", "second"])


class Outputs(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
        self.kind = kind

    def forward(self, x):
        y = self.body(x)
        z = y.sigmoid()
        if self.kind == "tuple":
            return y, z
        if self.kind == "list":
            return [y, z]
        if self.kind == "dict":
            return {"y": y, "z": z}
        if self.kind == "ordered":
            return OrderedDict(y=y, z=z)
        if self.kind == "named":
            return Pair(y, z)
        if self.kind == "nested":
            return {"a": [y, (z, None)], "b": {"c": y + z}, "n": 3, "s": "text"}
        if self.kind == "integer":
            return y, y.argmax(-1), (y > 0)
        if self.kind == "detached":
            return y, z.detach()
        if self.kind == "input":
            return y, x
        if self.kind == "view of input":
            return y, x.view(-1)[3:]
        if self.kind == "view of output":
            return y, y.view(-1), y[0]
        if self.kind == "same twice":
            return y, y
        if self.kind == "parameter":
            return y, self.body[0].weight
        if self.kind == "none":
            return y, None
        if self.kind == "empty":
            return y, x[:0]
        assert self.kind == "constant"
        return y, torch.ones(3)


@pytest.mark.parametrize(
    "kind",
    [
        *("tuple", "list", "dict", "ordered", "named", "nested", "integer", "detached", "input", "view of input"),
        *("view of output", "same twice", "parameter", "none", "constant", "empty"),
    ],
)
def test_outputs(cache, kind):
    check(Outputs(kind), (torch.randn(256, 8),), cache, steps=2)


def test_an_input_returned_is_that_input(cache):
    model = recoup.optimize(Outputs("input"), budget=1.0, cache=cache, **QUICK)
    x = torch.randn(4, 8)
    assert model(x)[1] is x


def test_inputs_that_want_gradients(cache):
    model = net()
    x = images()
    fraction = tight(model, x, 0.3, cache, 0.02)
    results = []
    for planned in (False, True):
        if planned:
            recoup.optimize(model, budget=fraction, cache=cache, **QUICK)
        mine = x.clone().requires_grad_()
        middle = mine * 2
        model(middle).square().sum().backward()
        results.append(mine.grad)
    assert_same(results[1], results[0])


def test_keyword_arguments_and_defaults(cache):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 8)

        def forward(self, x, *, scale=1.0, extra=None, flag=False):
            y = self.b(torch.tanh(self.a(x)) * scale)
            y = y if extra is None else y + extra
            return y.relu() if flag else y

    x = torch.randn(256, 8)
    check(Net(), {"x": x, "scale": 2.0, "extra": torch.randn(8), "flag": True}, cache, steps=2, recomputes=False)
    check(Net(), {"x": x}, cache, steps=2, recomputes=False)


def test_arguments_in_containers(cache):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 8)

        def forward(self, batch, many):
            return self.b(self.a(batch["x"]).relu()) * many[0] + many[1]

    check(Net(), ({"x": torch.randn(256, 8), "name": "b"}, [torch.randn(8), 2]), cache, steps=2, recomputes=False)


class TestLosses:
    @pytest.mark.parametrize("share", [0.1, 1.0])
    def test_several_backwards_over_one_forward(self, cache, share):
        model = Outputs("tuple")
        plain = copy.deepcopy(model)
        x = torch.randn(256, 8)
        recoup.optimize(model, budget=tight(model, x, share, cache, 0.02), cache=cache, **QUICK)
        for each in (plain, model):
            y, z = each(x)
            y.square().sum().backward(retain_graph=True)
            z.sum().backward()
        assert_same(state(model), state(plain))

    def test_several_backwards_after_ordinary_ones(self, cache):
        model = net(dropout=0.2)
        plain = copy.deepcopy(model)
        x = images()
        recoup.optimize(model, budget=tight(model, x, 0.3, cache, 0.05), cache=cache, **QUICK)

        def train(each):
            torch.manual_seed(0)
            each(x).square().mean().backward()
            loss = each(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()

        train(plain)
        with pytest.warns(recoup.RecoupWarning, match="keeps what the plan frees"):
            train(model)
        assert_same(state(model), state(plain))

    def test_a_loss_of_one_output_only(self, cache):
        model = Outputs("tuple")
        check(model, (torch.randn(256, 8),), cache, loss=lambda outputs: outputs[1].square().sum(), steps=2)

    def test_accumulated_gradients(self, cache):
        model = net(dropout=0.2, norm=True)
        plain = copy.deepcopy(model)
        batches = [images() for _ in range(3)]
        recoup.optimize(model, budget=tight(model, batches[0], 0.3, cache, 0.05), cache=cache, **QUICK)
        for each in (plain, model):
            torch.manual_seed(0)
            for x in batches:
                each(x).square().mean().backward()
        assert_same(state(model), state(plain))

    def test_two_forwards_before_their_backwards(self, cache):
        model = net(dropout=0.2, norm=True)
        plain = copy.deepcopy(model)
        first, second = images(), images()
        recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
        for each in (plain, model):
            torch.manual_seed(0)
            a, b = each(first), each(second)
            (a.square().sum() + b.sum()).backward()
        assert_same(state(model), state(plain))

    def test_autograd_grad(self, cache):
        model = net()
        plain = copy.deepcopy(model)
        x = images()
        recoup.optimize(model, budget=tight(model, x, 0.3, cache, 0.02), cache=cache, **QUICK)
        ours = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        theirs = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
        assert_same(ours, theirs)

    def test_a_forward_whose_backward_never_runs(self, cache):
        model = net(norm=True)
        plain = copy.deepcopy(model)
        x = images()
        recoup.optimize(model, budget=tight(model, x, 0.3, cache, 0.02), cache=cache, **QUICK)
        for each in (plain, model):
            each(x)
            each(x).sum().backward()
        assert_same(state(model), state(plain))
