"""Operators are planned as plain PyTorch runs them: dropout, interpolation, and others that it captures in pieces."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import recoup
from recoup.torch.internals.graphs import NONDETERMINISTIC
from recoup.torch.internals.operators import _is_one_factor
from tests.torch_helpers import QUICK, assert_same, check, images, net

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::recoup.RecoupWarning"),
]


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.3, False)])
def test_what_drops_nothing_is_no_copy(cache, p, training):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 64)

        def forward(self, x):
            y = self.first(x)
            functional.dropout(y, p, training).add_(1)
            return self.second(y.tanh()).tanh()

    check(Writes(), (torch.randn(256, 8),), cache, recomputes=False)


def test_dropout_of_everything(cache):
    """Plain dropout draws no numbers for it, and the next one draws them."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(1.0), nn.Tanh(), nn.Linear(64, 64), nn.Dropout(0.3), nn.Tanh())
    check(model, (torch.randn(256, 8),), cache)


@pytest.mark.parametrize("p", [0.04, 0.09, 0.1, 0.128])
def test_dropout_by_any_factor(cache, p):
    layers = [(nn.Linear(width, 64), nn.Dropout(p), nn.Tanh()) for width in (8, 64, 64)]
    model = nn.Sequential(*(part for layer in layers for part in layer))
    planned = check(model, (torch.randn(256, 8),), cache)
    names = {op.name for op in recoup.plans(planned)[0].graph.ops}
    assert ("aten.native_dropout.default" in names) == (p == 0.1)


def test_which_dropout_is_that_of_plain_pytorch():
    """By its factor, which is the same for every element."""
    x = torch.ones(64)
    for p in (number / 200 for number in range(1, 200)):
        torch.manual_seed(0)
        plain = functional.dropout(x, p)
        torch.manual_seed(0)
        masked, _ = torch.ops.aten.native_dropout(x, p, True)
        assert torch.equal(plain, masked) == _is_one_factor(p, x.dtype) or not plain.any(), p


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dropout_in_16_bits(cache, dtype):
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 64), nn.Dropout(0.1), nn.Tanh())
    check(model.to(dtype), (torch.randn(256, 8, dtype=dtype),), cache)


@pytest.mark.parametrize(
    ("mode", "sides"),
    [
        ("linear", 1),
        ("bilinear", 2),
        ("bicubic", 2),
        ("trilinear", 3),
        ("nearest", 2),
        ("nearest-exact", 2),
        ("area", 2),
    ],
)
def test_interpolation(cache, mode, sides):
    """As the one operator that it is, not as the dozens that it can be made of."""

    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[sides - 1]
            self.layers = nn.ModuleList(kind(3, 3, 3, padding=1) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = functional.interpolate(layer(x).relu(), scale_factor=1.5, mode=mode).tanh()
            return x

    model = check(Grows(), (torch.randn(4, 3, *[6] * sides),), cache, recomputes=False)
    ops = [op.name for op in recoup.plans(model)[0].graph.ops]
    assert len(ops) < 40
    assert mode == "area" or sum(f"upsample_{mode.replace('-', '_')}" in name for name in ops) == 6


@pytest.mark.parametrize("kind", ["multi_margin_loss", "multilabel_margin_loss"])
def test_losses_with_margins(cache, kind):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))

        def forward(self, x, y):
            return getattr(functional, kind)(self.layers(x), y)

    y = torch.randint(16, (256, 16)) if kind == "multilabel_margin_loss" else torch.randint(16, (256,))
    check(Net(), (torch.randn(256, 16), y), cache, share=0.6)


def test_softshrink_of_a_gradient_that_overflows(cache):
    """As it does under autocast in 16 bits now and then: what is not shrunk gets it, and the rest zeros."""
    gradients = []
    for kind in ("plain", "planned"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Softshrink())
        if kind == "planned":
            recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
        out = model(torch.randn(64, 16))
        out.backward(torch.full_like(out, float("inf")))
        gradients.append(model[0].bias.grad)
    assert not gradients[0].isnan().any()
    assert_same(gradients[1], gradients[0])


def test_what_is_not_deterministic_has_its_name():
    newer = {"_upsample_lanczos2d_aa_backward", "_cudnn_attention_backward"}  # than torch 2.11
    assert {name for name in NONDETERMINISTIC if not hasattr(torch.ops.aten, name)} <= newer


def test_the_kernels_of_other_programs_are_left_alone(cache):
    bilinear = torch.ops.aten.upsample_bilinear2d.vec
    before = dict(bilinear.py_kernels), dict(torch.ops.aten.dropout.default.py_kernels)
    check(net(dropout=0.5), (images(),), cache, steps=1)
    assert before == (bilinear.py_kernels, torch.ops.aten.dropout.default.py_kernels)
