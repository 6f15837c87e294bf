"""What the captured graph is changed to before a compiled step is planned: pools, concatenations, what draws."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from recoup.torch.fusion import folded_nodes
from recoup.torch.internals.graphs import compile_joint
from recoup.torch.internals.inductor import is_generated
from recoup.torch.joint import ARRIVAL, read_joint
from recoup.torch.rewrite import copy_parts, forget_pooled
from recoup.torch.rng import EAGER
from recoup.torch.split import split

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("pool", "channels_last", "kind"),
    [
        (nn.MaxPool2d(2), False, "folded"),
        (nn.MaxPool2d(2), True, "generated"),
        (nn.MaxPool2d(3, stride=2), False, "generated"),
        (nn.MaxPool2d(2, dilation=2), False, "of a library"),
        (nn.MaxPool2d(6, stride=1), False, "of a library"),
        (nn.AvgPool2d(2), True, "folded"),
        (nn.AvgPool2d(3, stride=1), True, "generated"),
    ],
)
def test_the_backward_of_a_pool(pool, channels_last, kind):
    """Inductor computes it inside its readers where windows do not overlap, and has the gradient written."""
    found = []

    def partition(traced, count):
        copy_parts(traced)
        forget_pooled(traced, channels_last)
        folded = folded_nodes(traced, channels_last)
        (node,) = (node for node in traced.graph.nodes if "pool2d" in node.name and node.name.endswith("backward"))
        assert node.args[0] not in folded
        (copy,) = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.maximum.default)
        is_written = kind == "of a library"  # which reads what is pooled, too
        assert (copy in folded, copy.args[0] in folded) == (is_written, not is_written)
        found.append("folded" if node in folded else "generated" if is_generated(node) else "of a library")
        return as_it_is(traced, count, folded)

    def backend(module, args):
        return compile_joint(module, args, partition)

    torch._dynamo.reset()
    x, y = torch.randn(2, 4, 64, 64, requires_grad=True), torch.randn(4, 1, 1)
    torch.compile(lambda x: pool((x * y).relu()).sin() * 2, backend=backend)(x).sum().backward()
    (expected,) = torch.autograd.grad((pool((x * y).relu()).sin() * 2).sum(), x)
    assert torch.equal(x.grad, expected)
    assert found == [kind]


def test_what_is_concatenated_and_read_elsewhere_is_copied():
    """Else it would be made inside of the concatenation, which would stay for as long."""

    def function(x):
        kept, gone = x.relu(), x.cos()
        return torch.cat([kept, gone, x], dim=1), kept.sum()

    traced = make_fx(function, tracing_mode="fake")(torch.randn(128, 128))
    copy_parts(traced)
    (concatenation,) = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert [str(part.target) for part in concatenation.args[0]] == ["aten.maximum.default", "aten.cos.default", "x_1"]
    x = torch.randn(128, 128)
    x[0, 0] = torch.nan
    for ours, theirs in zip(traced(x), function(x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def as_it_is(traced, count, folded):
    """The halves of a step in its own order."""
    joint = read_joint(traced, count, folded)
    forward, backward = ([op.id for op in joint.ops if op.phase == phase] for phase in ("forward", "backward"))
    return split(joint, [*forward, ARRIVAL, *backward], EAGER)


class Draws(torch.autograd.Function):
    """Draws in the backward, beside a concatenation of something from the forward."""

    @staticmethod
    def forward(ctx, x):
        kept = x.relu()
        ctx.save_for_backward(kept)
        return kept.cos()

    @staticmethod
    def backward(ctx, gradient):
        (kept,) = ctx.saved_tensors
        both = torch.cat([kept, gradient * torch.rand(128, 128)])
        return both[:128] * both[128:] * kept


def test_what_draws_in_the_backward_stays_there():
    phases = {}

    def partition(traced, count):
        copy_parts(traced)
        folded = folded_nodes(traced)
        phases.update((op.id, op.phase) for op in read_joint(traced, count, folded).ops if op.random)
        return as_it_is(traced, count, folded)

    def backend(module, args):
        return compile_joint(module, args, partition)

    torch._dynamo.reset()
    x = torch.randn(128, 128, requires_grad=True)
    torch.compile(lambda x: Draws.apply(x) + torch.rand(128, 128), backend=backend, fullgraph=True)(x).sum().backward()
    assert list(phases.values()) == ["forward", "backward"]
