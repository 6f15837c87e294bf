"""The DTR runtime on CPU: the same bits at any budget, never a byte over it, whatever the program does."""

import copy
import gc
import warnings
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import recoup
from recoup.errors import RecoupWarning
from recoup.torch.memory import allocation_curve, resident_bytes
from recoup.torch.models import MODELS, example
from recoup.torch.models.dynamic import Recursive, Routed, Tree, TreeLSTM, UnrolledGAN
from tests.torch_helpers import assert_same, state

pytestmark = pytest.mark.usefixtures("one_thread", "seen")

CPU = torch.device("cpu")
ROOM = "64GiB"


def dtr(budget, **options):
    return recoup.dtr(budget, device="cpu", **options)


# every model, any budget, the same bits


def three_steps(model, loss, make_optimizer=None):
    """Losses and everything a user can see after three optimizer steps."""
    make_optimizer = make_optimizer or (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))
    optimizer = make_optimizer(model.parameters())
    losses = []
    for seed in range(3):
        torch.manual_seed(seed)
        value = loss(model)
        value.backward()
        losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
        del value
    return losses


def seen(model, losses):
    return {"losses": losses, **state(model)}


def check(model, loss, shares, make_optimizer=None):
    """Against the plain run, at these shares of its peak or at the smallest budget that works, and a tenth more."""
    plain = copy.deepcopy(model)
    theirs = seen(plain, three_steps(plain, loss, make_optimizer))
    del plain
    ours = copy.deepcopy(model)
    gc.collect()
    with dtr(ROOM) as run:
        losses = three_steps(ours, loss, make_optimizer)
    assert_same(seen(ours, losses), theirs, "with room for everything")
    assert run.report.evictions == 0
    peak = run.report.wanted_bytes
    del ours, run
    for share in shares:
        budget = int(share * peak)
        while True:
            ours = copy.deepcopy(model)
            gc.collect()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RecoupWarning)
                    with dtr(budget) as run:
                        losses = three_steps(ours, loss, make_optimizer)
                break
            except recoup.BudgetError:
                budget = int(1.1 * budget)
        assert_same(seen(ours, losses), theirs, f"at {budget / peak:.3f}")
        assert run.report.peak_bytes <= budget
        if budget < 0.9 * peak:
            assert run.report.evictions > 0
        del ours, run


def built_in(name):
    torch.manual_seed(0)
    made = example(name)
    return made.model, lambda model: made.loss(model(*made.inputs))


def dynamic(name):
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    trees = [Tree.random(leaves, 50, leaves) for leaves in (12, 7, 15)]
    noise, real = torch.randn(64, 16), torch.randn(64, 16) + 2
    cells, head = nn.LSTMCell(8, 24), nn.Linear(24, 3)
    words = torch.randn(13, 16, 8)

    def varying(model):
        h = c = torch.zeros(16, 24)
        for t in range((9, 4, 13)[torch.initial_seed() % 3]):  # another length in each step
            h, c = model[0](words[t], (h, c))
        return model[1](h).square().mean()

    return {
        "tree": lambda: (TreeLSTM(), lambda model: model(trees).square().mean()),
        "recursive": lambda: (Recursive(), lambda model: model(x).square().mean()),
        "routed": lambda: (Routed(), lambda model: model(x).square().mean()),
        "unrolled": lambda: (UnrolledGAN(), lambda model: model(noise, real)),
        "varying": lambda: (nn.ModuleList([cells, head]), varying),
    }[name]()


DYNAMIC = {"tree": 0.6, "recursive": 0.6, "routed": 0.85, "unrolled": 0.6, "varying": 0.6}
"""Models, each with a share of its peak near the smallest that works: below that it computes for long, and gives up."""


@pytest.mark.parametrize("name", ["resnet50", "unet", "gpt"])
def test_a_selection(name):
    check(*built_in(name), (0.6,))


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_models(name):
    check(*dynamic(name), (DYNAMIC[name],))


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_every_model(name):
    check(*built_in(name), (0.7, 0.5, 0.4))


@pytest.mark.full
@pytest.mark.parametrize("name", DYNAMIC)
def test_every_dynamic_model(name):
    check(*dynamic(name), (0.7, 0.5, 0.4))


def test_adam_and_accumulation():
    model, loss = built_in("vit")
    check(model, lambda m: loss(m) + loss(m), (0.7,), lambda p: torch.optim.Adam(p, lr=1e-3))


# any program


PROGRAM = (
    "relu",
    "relu_",
    "mul",
    "mul_",
    "slice",
    "transpose",
    "add_",
    "copy_",
    "dropout",
    "matmul",
    "drop",
    "sum",
    "cat",
)


def run_program(steps, x):
    """Views, writes through views and to bases, randomness, and tensors let go of."""
    values = [x * 1.5]
    for kind, one, two in steps:
        a, b = values[one % len(values)], values[two % len(values)]
        if kind == "relu":
            values.append(torch.relu(a))
        elif kind == "relu_":
            a.relu_()
        elif kind == "mul":
            values.append(a * 0.75)
        elif kind == "mul_":
            a.mul_(1.25)
        elif kind == "slice":
            values.append(a[: max(1, a.shape[0] // 2)])
        elif kind == "transpose":
            values.append(a.t())
        elif kind == "add_" and a.shape == b.shape:
            a.add_(b.clone(), alpha=0.5)
        elif kind == "copy_" and a.shape == b.shape:
            a.copy_(b.clone())
        elif kind == "dropout":
            values.append(torch.dropout(a, 0.3, True))
        elif kind == "matmul" and a.dim() == 2 and a.shape[1] == b.shape[0]:
            values.append((a @ b).tanh())
        elif kind == "drop" and len(values) > 2:
            del values[one % len(values)]
        elif kind == "sum":
            values.append(a + a.sum())
        elif kind == "cat" and a.shape[1:] == b.shape[1:] and a.shape[0] + b.shape[0] <= 32:
            values.append(torch.cat([a, b]))
        del a, b
    return [value.clone() for value in values]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(PROGRAM), st.integers(0, 20), st.integers(0, 20)), min_size=4, max_size=30),
    st.floats(0.3, 0.9),
)
def test_any_program_of_views_and_writes(steps, share):
    with torch.no_grad():
        torch.manual_seed(1)
        x = torch.randn(16, 16)
        before = resident_bytes(CPU)
        torch.manual_seed(2)
        theirs = [value.tolist() for value in run_program(steps, x)]
        end = torch.get_rng_state().tolist()
        torch.manual_seed(2)
        with dtr(ROOM) as run:
            run_program(steps, x)
        peak = run.report.wanted_bytes
        budget = before + int(share * (peak - before))
        while True:
            torch.manual_seed(2)
            try:
                with dtr(budget, limit=None) as run:
                    ours = [value.tolist() for value in run_program(steps, x)]
                break
            except recoup.BudgetError:
                budget += max(4096, (peak - budget) // 4)
        assert ours == theirs
        assert torch.get_rng_state().tolist() == end
        assert run.report.peak_bytes <= budget


@pytest.mark.by_tensors
def test_the_peak_is_what_the_allocator_counts():
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
    x = torch.randn(256, 64)

    def step():
        model(x).square().mean().backward()

    plain = max(allocation_curve(step))
    model.zero_grad()
    gc.collect()
    before = resident_bytes(CPU)
    budget = before + int(0.75 * plain)
    with dtr(budget) as run:
        measured = before + max(allocation_curve(step))
    assert run.report.evictions > 0
    assert 0.9 * run.report.peak_bytes <= measured <= run.report.peak_bytes <= budget


@pytest.mark.by_tensors
def test_a_long_chain_comes_back_without_recursion():
    x = torch.zeros(64)
    before = resident_bytes(CPU)
    with torch.no_grad(), dtr(before + 5 * 256 + 512, heuristic="lru", limit=None) as run:
        kept = [x]
        for _ in range(3000):
            kept.append(kept[-1] + 1)
        assert kept[2900][0].item() == 2900
        del kept
    assert run.report.rematerializations == 2900


# PyTorch's meaning


@contextmanager
def squeezed():
    """Eight tensors of 4 KiB with room for five."""
    x = torch.arange(1024.0)
    with dtr(resident_bytes(CPU) + 5 * 4096 + 512) as run:
        values = [x + number for number in range(8)]
        yield values
        values.clear()
    assert run.report.rematerializations > 0


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.tolist(),
        lambda t: t.numpy().tolist(),
        lambda t: [t[i].item() for i in range(len(t))],
        lambda t: memoryview(t.numpy()).tolist(),
        lambda t: torch.from_dlpack(t).tolist(),
        lambda t: copy.deepcopy(t).tolist(),
    ],
)
def test_bytes_taken_past_the_dispatcher(read):
    with squeezed() as values:
        for number in (0, 1, 2):
            assert read(values[number]) == [float(number + i) for i in range(1024)]
            values[number] = None


def test_what_was_given_out_stays():
    with squeezed() as values:
        array = values[0].numpy()
        for value in values:  # they cannot all be there
            value.sum()
        assert array[5] == 5.0
        assert values[0].untyped_storage().nbytes() == 4096


def test_what_is_held_comes_back_at_the_end():
    x = torch.arange(1024.0)
    with dtr(resident_bytes(CPU) + 3 * 4096):
        values = [x + 1, x + 2]
        for value in values:
            (value * 2).sum().item()
    assert values[0][0].item() == 1
    assert values[1][1023].item() == 1025


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


def double_backward(model, x):
    y = Cube.apply(model(x)).sum()
    (grad,) = torch.autograd.grad(y, model[0].weight, create_graph=True)
    return y + grad.square().sum()


def with_hooks(model, x):
    out = model(x)
    out.register_hook(lambda grad: grad * 2)
    return out.square().mean()


def with_no_grad(model, x):
    with torch.no_grad():
        target = model(x).clone()
    return (model(x) - 0.5 * target).square().mean()


def under_autocast(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float().square().mean()


def in_place_on_a_view(model, x):
    y = model(x) * 1.0
    y[:, :8].mul_(2.0)
    z = y.view(-1)
    z[::2].add_(1.0)
    return (y * z.view_as(y)).mean()


@pytest.mark.parametrize("loss", [double_backward, with_hooks, with_no_grad, under_autocast, in_place_on_a_view])
def test_autograd_as_ever(loss):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.ReLU(inplace=True))))
    x = torch.randn(128, 32)
    check(model, lambda m: loss(m, x), (0.7,))


def test_a_compiled_model_runs_eagerly_inside():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    x = torch.randn(4, 8)
    compiled = torch.compile(model, backend="eager")
    with dtr(ROOM):
        assert torch.equal(compiled(x), model(x))


def test_two_blocks_after_each_other_and_training_after_them():
    model, loss = built_in("lstm")
    plain = copy.deepcopy(model)
    for number in range(3):
        torch.manual_seed(number)
        if number < 2:
            with dtr(ROOM):
                loss(model).backward()
        else:
            loss(model).backward()
        torch.manual_seed(number)
        loss(plain).backward()
    assert_same(state(model), state(plain))
