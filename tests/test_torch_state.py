"""Buffers, statistics, tied and frozen parameters and in-place writes end up as the plain step leaves them."""

import copy

import pytest
import torch
from torch import nn

import recoup
from tests.torch_helpers import QUICK, assert_same, check, images, net, repeats, state, tight

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::recoup.RecoupWarning"),
]


class TestState:
    def test_batch_norm_statistics(self, cache):
        planned = check(net(norm=True), (images(),), cache, share=0.1)
        assert [int(module.num_batches_tracked) for module in planned if isinstance(module, nn.BatchNorm2d)] == [3] * 3

    def test_a_batch_norm_applied_twice_and_run_again_in_between(self, cache):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.convolution, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

            def forward(self, x):
                first = self.norm(self.convolution(x))
                with torch.no_grad():  # the peak
                    wide = torch.sin(x.repeat(1, 24, 1, 1)).cos().mean(1, keepdim=True)
                return self.norm(first + wide)

        check(Twice(), (images(4, 32),), cache, share=0.0)

    @pytest.mark.parametrize("arguments", [{"affine": False}, {"track_running_stats": False}, {"momentum": 0.5}])
    def test_batch_norm_of_every_kind(self, cache, arguments):
        pairs = ((nn.Conv2d(i, 8, 3, padding=1), nn.BatchNorm2d(8, **arguments), nn.ReLU()) for i in (3, 8, 8))
        check(nn.Sequential(*(layer for triple in pairs for layer in triple)), (images(),), cache, share=0.2)

    def test_batch_norm_frozen_in_training(self, cache):
        class Frozen(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = net(norm=True)

            def forward(self, x):
                return self.body(x)

            def train(self, mode=True):
                super().train(mode)
                for module in self.modules():
                    if isinstance(module, nn.BatchNorm2d):
                        module.eval()
                return self

        check(Frozen().train(), (images(),), cache, share=0.2)

    def test_instance_and_group_norm(self, cache):
        model = nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()),
        )
        check(model, (images(),), cache, share=0.2)

    def test_a_module_called_twice(self, cache):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.conv = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
                self.norm, self.drop = nn.BatchNorm2d(8), nn.Dropout(0.3)

            def forward(self, x):
                x = self.first(x)
                for _ in range(3):
                    x = self.drop(self.norm(self.conv(x)).relu())
                return x

        planned = check(Twice(), (images(),), cache, share=0.2)
        assert int(planned.norm.num_batches_tracked) == 9

    def test_tied_weights(self, cache):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(32, 16)
                self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
                self.head = nn.Linear(16, 32, bias=False)
                self.head.weight = self.embed.weight

            def forward(self, tokens):
                return self.head(self.body(self.embed(tokens)))

        planned = check(Tied(), (torch.randint(32, (8, 16)),), cache)
        assert planned.head.weight is planned.embed.weight

    def test_frozen_parameters(self, cache):
        model = net(norm=True)
        for parameter in model[:4].parameters():
            parameter.requires_grad_(False)
        planned = check(model, (images(),), cache)
        assert planned[0].weight.grad is None
        assert planned[-1].weight.grad is not None

    def test_freezing_between_steps(self, cache):
        model = net()
        plain = copy.deepcopy(model)
        x = images()
        recoup.optimize(model, budget=tight(model, x, 0.4, cache, 0.02), cache=cache, **QUICK)
        for wanted in (True, False, True):
            for each in (plain, model):
                each[0].requires_grad_(wanted)
                each.zero_grad(set_to_none=True)
                each(x).square().sum().backward()
            assert_same(state(model), state(plain), f"requires_grad {wanted}")

    def test_unused_parameters(self, cache):
        class Unused(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.never = net(), nn.Linear(3, 3)

            def forward(self, x):
                return self.body(x)

        assert check(Unused(), (images(),), cache).never.weight.grad is None

    def test_parametrized_weights(self, cache):
        model = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(8, 64)),
            *(layer for _ in range(4) for layer in (nn.Tanh(), nn.Linear(64, 64))),
        )
        check_without_copy(model, torch.randn(256, 8), cache)

    def test_spectral_norm_writes_its_vectors_once(self, cache):
        model = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(8, 64)),
            *(layer for _ in range(4) for layer in (nn.Tanh(), nn.Linear(64, 64))),
        )
        check_without_copy(model, torch.randn(256, 8), cache)


def check_without_copy(model, x, cache):
    """The same model plain and planned, from the same start."""
    start = copy.deepcopy(model.state_dict())
    results = []
    for planned in (False, True):
        model.load_state_dict(start)
        if planned:
            fraction = tight(model, x, 0.3, cache, 0.002)
            model.load_state_dict(start)
            recoup.optimize(model, budget=fraction, cache=cache, **QUICK)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            model(x).square().sum().backward()
        results.append(state(model))
    assert_same(results[1], results[0])
    assert repeats(model) > 0


class TestWriting:
    def test_in_place_ops(self, cache):
        class InPlace(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.c = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 64)

            def forward(self, x):
                y = self.a(x)
                y.add_(1.0).relu_()
                y = self.b(y)
                y[:, :3] = 0.0
                y.mul_(2).clamp_(min=-1).sigmoid_()
                z = self.c(y)
                z[0].copy_(y[1])
                z += y
                return z

        check(InPlace(), (torch.randn(256, 8),), cache)

    def test_an_input_is_written(self, cache):
        class Writes(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))

            def forward(self, x):
                y = self.body(x + 1)
                x.add_(1.0)
                return self.body(x) + y

        check(Writes(), (torch.randn(256, 8),), cache)

    def test_a_buffer_is_written(self, cache):
        class Writes(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
                self.register_buffer("calls", torch.zeros((), dtype=torch.long))
                self.register_buffer("mean", torch.zeros(8))

            def forward(self, x):
                self.calls += 1
                y = self.body(x - self.mean) * self.calls
                self.mean.lerp_(x.detach().mean(0), 0.1)
                return y + self.mean

        planned = check(Writes(), (torch.randn(256, 8),), cache)
        assert int(planned.calls) == 3

    def test_a_buffer_is_replaced(self, cache):
        class Replaces(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
                self.register_buffer("mean", torch.zeros(8))

            def forward(self, x):
                y = self.body(x - self.mean)
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
                return y

        check(Replaces(), (torch.randn(256, 8),), cache)

    def test_an_attribute_keeps_an_activation(self, cache):
        class Keeps(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 64)
                self.kept = None

            def forward(self, x):
                y = self.a(x).tanh()
                self.kept = y
                return self.b(y).tanh().sum() + self.kept.square().sum()

        model = Keeps()
        plain = copy.deepcopy(model)
        recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
        x = torch.randn(256, 8)
        for each in (plain, model):
            (each(x) + each.kept.sum()).backward()
        assert_same(model.kept, plain.kept)
        assert_same(state(model), state(plain))


def test_what_is_overwritten_is_read_before(cache):
    """A copy that only the backward reads is made before the original changes."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(scale.clone())
            return x * scale

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0], None

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("scale", torch.ones(16))

        def forward(self, x):
            y = Scaled.apply(self.linear(x), self.scale)
            self.scale.add_(1)
            return y

    check(Model(), (torch.randn(64, 16),), cache, budget=1.0, recomputes=False)


def test_buffers_that_share_memory(cache):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            memory = torch.linspace(0.1, 1, 1024 * 64 + 64)
            self.register_buffer("large", memory[: 1024 * 64].view(1024, 64))
            self.register_buffer("small", memory[32 : 32 + 64])

        def forward(self, x):
            y = torch.tanh(torch.tanh(self.linear(x)) * torch.exp(self.large))
            self.small.mul_(3.0)
            return y.tanh().sum()

    torch.manual_seed(0)
    model = Model()
    torch.manual_seed(0)
    plain = Model()  # a deep copy of buffers would not share
    x = torch.randn(1024, 64)
    recoup.optimize(model, budget=tight(model, x, 0.0, cache, 0.01), cache=cache, **QUICK)
    for _ in range(2):
        for each in (model, plain):
            each.zero_grad()
            each(x).backward()
        assert_same(state(model), state(plain))
    assert repeats(model) > 0
