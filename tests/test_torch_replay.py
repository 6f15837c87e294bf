"""Compiled, a random op that runs again draws the same numbers, also where Inductor only calls it."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor_config
from torch.nn import functional

from recoup.torch.fusion import folded_nodes
from recoup.torch.internals.inductor import compile_inductor
from recoup.torch.joint import ARRIVAL, read_joint
from recoup.torch.rng import INDUCTOR
from recoup.torch.split import split

pytestmark = pytest.mark.usefixtures("one_thread")


def counts(x):
    """Inductor generates code for uniform and normal numbers, and calls PyTorch for these."""
    return (x @ x.T) * torch.poisson(x.detach().abs())


def dropped(x):
    """Read by nothing but pointwise ops."""
    return x + functional.dropout(x @ x.T, 0.5).tanh()


def attention(x):
    """On CUDA one kernel, which draws what it drops."""
    heads = x.view(1, 4, -1, x.shape[-1]).half()
    return functional.scaled_dot_product_attention(heads, heads.sin(), heads.cos(), dropout_p=0.5).float()


def step(function, x, *, again):
    """Result, gradient, the generator's next number, and what drew twice: ``again`` runs every forward op once more in
    the backward; else PyTorch's own partitioner splits the step."""
    replayed = []

    def partition(traced, outputs):
        if not again:
            return None
        joint = read_joint(traced, outputs, folded_nodes(traced))
        forward = [op for op in joint.ops if op.phase == "forward"]
        repeated = [op for op in forward if not op.once]
        replayed.extend(op.id for op in repeated if op.random)
        backward = [op.id for op in joint.ops if op.phase == "backward"]
        return split(joint, [*(op.id for op in forward), ARRIVAL, *(op.id for op in repeated), *backward], INDUCTOR)

    torch.compiler.reset()
    compiled = torch.compile(function, backend=lambda module, args: compile_inductor(module, args, partition))
    torch.manual_seed(0)
    result = compiled(x)
    torch.randn(3, device=x.device)  # the generator has moved on when the backward runs
    (gradient,) = torch.autograd.grad(result.sin().sum(), x)
    return result, gradient, torch.randn(1, device=x.device), replayed


def check(function, x, count=1, **tolerance):
    expected = step(function, x, again=False)
    found = step(function, x, again=True)
    assert len(found[-1]) == count
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


def test_what_inductor_calls_draws_the_same_again():
    check(counts, torch.randn(64, 64, requires_grad=True))


def test_seeds_of_inductors_own_are_drawn_once():
    check(dropped, torch.randn(64, 64, requires_grad=True), count=0)


def test_pytorchs_own_where_the_user_wants_them():
    with inductor_config.patch(fallback_random=True):
        check(dropped, torch.randn(64, 64, requires_grad=True))


@pytest.mark.gpu
def test_on_a_gpu_too():
    check(counts, torch.randn(64, 64, device="cuda", requires_grad=True))


@pytest.mark.gpu
def test_attention_drops_the_same_again():
    """Where the two fuse a cast they round differently, by half precision; another mask is off by much more."""
    check(attention, torch.randn(64, 64, device="cuda", requires_grad=True), rtol=1e-2, atol=1e-2)
