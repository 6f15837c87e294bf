"""Operators that are hard to run again: random numbers, constants, complex numbers, backwards of one's own."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import recoup
from tests.torch_helpers import QUICK, assert_same, check, images, net, state, tight

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::recoup.RecoupWarning"),
]


class TestRandomness:
    def test_dropout_draws_afresh_and_replays(self, cache):
        check(net(dropout=0.5), (images(),), cache, steps=4, share=0.15)

    def test_two_steps_without_a_seed_differ(self, cache):
        model = net(dropout=0.5)
        x = images()
        recoup.optimize(model, budget=tight(model, x, 0.3, cache, 0.02), cache=cache, **QUICK)
        torch.manual_seed(0)
        first, second = model(x).detach(), model(x).detach()
        assert not torch.equal(first, second)

    def test_dropout_of_nothing(self, cache):
        model = nn.Sequential(
            nn.Linear(8, 64),
            nn.Dropout(0.0),
            nn.Tanh(),
            nn.Linear(64, 64),
            nn.Dropout(0.0),
            nn.Tanh(),
            nn.Linear(64, 2),
        )
        check(model, (torch.randn(256, 8),), cache)

    def test_a_bernoulli_of_nothing_draws(self, cache):
        class Depth(nn.Module):
            """Stochastic depth, whose first block is never dropped."""

            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

            def forward(self, x):
                for index, block in enumerate(self.blocks):
                    x = torch.tanh(block(x)) * (1 - torch.empty_like(x).bernoulli_(0.2 * index))
                return x

        check(Depth(), (torch.randn(256, 64),), cache, share=0.3)

    def test_a_backward_draws_in_its_turn(self, cache):
        class Noise(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                return gradient + torch.randn(256, 64)

        class Noisy(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

            def forward(self, x):
                for block in self.blocks:
                    x = Noise.apply(torch.tanh(block(x)))
                return x

        model = Noisy()
        plain = copy.deepcopy(model)
        x = torch.randn(256, 64)
        recoup.optimize(model, budget=tight(model, x, 0.5, cache), cache=cache, **QUICK)
        for each in (model, plain):
            torch.manual_seed(1)
            functional.dropout(each(x), 0.5).sum().backward()  # the loss draws before the backward does
        assert_same(state(model), state(plain))

    def test_other_random_ops(self, cache):
        class Noisy(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.c = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 4)

            def forward(self, x):
                y = torch.tanh(self.a(x)) + torch.randn(64)
                y = y * torch.rand_like(y) + torch.bernoulli(torch.full_like(y, 0.5))
                y = functional.rrelu(self.b(y), training=True)
                y = y[:, torch.randperm(64)]
                return self.c(y.sin() + torch.randint(0, 3, (64,)) + torch.normal(0.0, 1.0, (64,)))

        check(Noisy(), (torch.randn(256, 8),), cache, share=0.2)

    def test_attention_dropout(self, cache):
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention = nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True)
                self.norm = nn.LayerNorm(16)

            def forward(self, x):
                for _ in range(3):
                    x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
                return x

        check(Attention(), (torch.randn(8, 24, 16),), cache, share=0.2)

    def test_feature_and_alpha_dropout(self, cache):
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.Dropout2d(0.3), nn.SELU(), nn.AlphaDropout(0.2), nn.Conv2d(8, 8, 3), nn.SELU()
        )
        check(model, (images(),), cache, share=0.2)


class TestConstants:
    def test_masked_softmax(self, cache):
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv = nn.Linear(8, 24)
                self.register_buffer("mask", torch.ones(32, 32).triu(1).bool())

            def forward(self, x):
                for _ in range(2):
                    q, k, v = self.qkv(x).chunk(3, -1)
                    scores = (q @ k.transpose(-1, -2)).masked_fill(self.mask, float("-inf"))
                    x = x + scores.softmax(-1) @ v
                return x

        check(Attention(), (torch.randn(4, 32, 8),), cache)

    def test_infinities_and_nans(self, cache):
        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 64)
                self.register_buffer("low", torch.tensor(float("-inf")))

            def forward(self, x):
                y = self.b(self.a(x).tanh())
                y = torch.maximum(y, self.low) + torch.where(y > 0, y, torch.full_like(y, float("inf"))).clamp(max=1e4)
                return torch.nan_to_num(y / torch.where(y > 1e9, torch.nan, 1.0))

        check(Odd(), (torch.randn(256, 8),), cache)

    def test_numpy_and_tensor_constants(self, cache):
        table = torch.randn(64)

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 64)

            def forward(self, x):
                y = self.b((self.a(x) * table).tanh()) * torch.tensor([2.0]) + torch.arange(64)
                return self.b(y.sin()).tanh()

        check(Net(), (torch.randn(256, 8),), cache)


def test_recurrent_cells(cache):
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.LSTMCell(8, 32), nn.Linear(32, 8)

        def forward(self, x):
            h = c = torch.zeros(x.shape[1], 32)
            outputs = []
            for step in x.unbind():
                h, c = self.cell(step, (h, c))
                outputs.append(self.head(h))
            return torch.stack(outputs), (h, c)

    check(Cells(), (torch.randn(6, 16, 8),), cache)


def test_complex_numbers_and_fft(cache):
    class Fourier(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 64)

        def forward(self, x):
            y = torch.fft.rfft(self.a(x).tanh())
            y = torch.fft.irfft(y * torch.exp(1j * y.real), n=64)
            return self.b(y).tanh()

    check(Fourier(), (torch.randn(256, 8),), cache)


def test_a_custom_autograd_function(cache):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x.exp() * 3

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.b(Double.apply(self.a(x).tanh())).tanh()

    check(Net(), (torch.randn(256, 8),), cache)


@pytest.mark.parametrize("computed", [True, False])
def test_a_backward_that_writes_is_refused(cache, computed):
    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, count):
            ctx.count = count
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            ctx.count.add_(gradient.sum() if computed else 1)
            return gradient * 2, None

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            return Counts.apply(self.inside(x).tanh(), self.count).sum()

    model = recoup.optimize(Model(), budget=1.0, cache=cache, **QUICK)
    with pytest.raises(recoup.CaptureError, match="backward of this program writes"):
        model(torch.randn(4, 4))


def test_checkpointed_blocks_inside(cache):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16)) for _ in range(3)
            )

        def forward(self, x):
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return x

    check(Net(), (torch.randn(64, 16),), cache, steps=2, recomputes=False, budget=0.95)


def test_ops_whose_integers_and_numbers_must_be_right(cache):
    """They are measured with made-up ones: wrong offsets write anywhere, and probabilities are between 0 and 1."""

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.layer = nn.EmbeddingBag(10, 64), nn.Linear(64, 64)

        def forward(self, x):
            y = self.layer(self.bag(x).tanh()).sigmoid()
            return functional.binary_cross_entropy(y, torch.bernoulli(y).detach()) * y.sum()

    check(Bag(), (torch.randint(0, 10, (512, 5)),), cache, recomputes=False)


@pytest.mark.parametrize("name", ["inv", "cholesky", "solve"])
def test_ops_that_check_their_result(cache, name):
    """PyTorch gives their graphs inputs of its own, tokens that keep the checks in order."""

    class Solves(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            y = torch.tanh(self.first(x))
            square = y.t() @ y + 64 * torch.eye(64)
            if name == "solve":
                return torch.linalg.solve(square, self.second(y).t())
            return self.second(y) @ getattr(torch.linalg, name)(square)

    check(Solves(), (torch.randn(64, 64),), cache, budget=1.0, recomputes=False)
