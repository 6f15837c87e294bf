"""On a GPU: the same numbers as the plain step within what kernels differ by from run to run, and never over budget."""

import copy
import threading

import pytest
import torch
from torch import nn

import recoup
from recoup.torch import algorithms, measuring
from recoup.torch.memory import measure_peak
from recoup.torch.models import DenseNet, ResNet, UNet, ViT
from tests.torch_helpers import repeats, well_conditioned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("one_thread"),
]

CUDA = torch.device("cuda")
CASES = {
    "resnet": (lambda: ResNet(classes=10), lambda: torch.randn(64, 3, 96, 96)),
    "unet": (lambda: UNet(width=16), lambda: torch.randn(64, 3, 96, 96)),
    "vit": (lambda: ViT(image=64, patch=8, layers=6, width=192, heads=3), lambda: torch.randn(64, 3, 64, 64)),
    "densenet": (lambda: DenseNet(layers=(4, 4, 4), growth=16), lambda: torch.randn(64, 3, 96, 96)),
}
SHARE = 0.75  # of the plain step's measured peak
TOLERANCE = 1e-3  # of a gradient's norm: kernels that add in any order


def step(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss


def train(model, x):
    """Three steps: losses, the first one's gradients, the buffers after the last, and the generator's state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    losses, gradients = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        optimizer.zero_grad(set_to_none=True)
        losses.append(step(model, x).item())
        gradients = gradients or [parameter.grad.cpu() for parameter in model.parameters()]
        optimizer.step()
    return losses, gradients, [buffer.cpu() for buffer in model.buffers()], torch.cuda.get_rng_state().tolist()


def peak(model, x):
    model.zero_grad(set_to_none=True)
    return measure_peak(lambda: step(model, x), CUDA)


def assert_near(ours, exact, *plain):
    """As near to what float64 gives as plain steps are, twice over: how PyTorch's own benchmarks judge Inductor.

    A rectifier opens or shuts by the last bit, so one plain step may be nearer than rounding lets the next one be.
    """
    for mine, true, *theirs in zip(ours, exact, *plain, strict=True):
        allowed = 2 * max((yours - true).norm() for yours in theirs) + TOLERANCE / 10 * true.norm() + 1e-6
        assert (mine - true).norm() <= allowed


@pytest.mark.parametrize(("name", "mode"), [(name, "eager") for name in CASES] + [("densenet", "inductor")])
def test_same_numbers_within_the_budget(monkeypatch, cache, name, mode):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # three digits would hide a mistake
    torch.manual_seed(0)
    make, data = CASES[name]
    model, x = well_conditioned(make()).to(CUDA), data().to(CUDA)
    exact = train(copy.deepcopy(model).double(), x.double())[1]
    plain = copy.deepcopy(model)
    eager = train(copy.deepcopy(model), x)
    if mode == "inductor":
        plain.compile()
    theirs = train(plain, x)
    budget = int(SHARE * peak(plain, x))  # with the momentum
    del plain
    grows = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    recoup.optimize(model, budget=budget, reserve=grows, compile=mode, cache=cache, time_limit=5)
    ours = train(model, x)
    assert repeats(model) > 0
    assert_near(ours[1], exact, theirs[1], eager[1])
    assert ours[0] == pytest.approx(theirs[0], rel=TOLERANCE)
    for mine, yours in zip(ours[2], theirs[2], strict=True):
        torch.testing.assert_close(mine, yours, rtol=TOLERANCE, atol=1e-4)
    if mode == "eager":
        assert ours[3] == theirs[3]  # Inductor draws its seeds by its own count of random kernels
    assert peak(model, x) <= budget


@pytest.mark.parametrize("name", ["unet", "densenet"])
def test_the_same_bits_where_kernels_add_in_one_order(monkeypatch, cache, name):
    """Also the gradient of a convolution's input, which is computed without that input."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.manual_seed(0)
    make, data = CASES[name]
    model, x = make().to(CUDA), data().to(CUDA)
    plain, again = copy.deepcopy(model), copy.deepcopy(model)
    theirs, twice = train(plain, x), train(again, x)
    assert all(map(torch.equal, theirs[1], twice[1]))
    budget = int(SHARE * peak(plain, x))
    del plain, again
    grows = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    recoup.optimize(model, budget=budget, reserve=grows, compile="eager", cache=cache, time_limit=5)
    ours = train(model, x)
    assert repeats(model) > 0
    assert ours[0] == theirs[0]
    assert all(map(torch.equal, ours[1], theirs[1]))
    assert all(map(torch.equal, ours[2], theirs[2]))


def test_the_first_planned_step_tries_no_algorithms(monkeypatch, cache):
    """cuDNN tries them once per thread, with all the workspace there is: the budget would not hold."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.manual_seed(0)
    make, data = CASES["unet"]
    model, x = make().to(CUDA), data().to(CUDA)
    budget = int(SHARE * recoup.plan(model, x, 1.0, compile="eager", cache=cache).peak_bytes)
    measure, threads = measuring.measure, set()
    monkeypatch.setattr(measuring, "measure", lambda *args: threads.add(threading.get_ident()) or measure(*args))
    monkeypatch.setattr(algorithms, "_tried", {})
    monkeypatch.setattr(algorithms, "_rooms", {})
    recoup.plan(model, x, budget, compile="eager", cache=cache, time_limit=5)
    assert len(threads) == 2
    recoup.optimize(model, budget=budget, compile="eager", cache=cache, time_limit=5)
    assert measure_peak(lambda: step(model, x), CUDA) <= budget
    assert repeats(model) > 0


def test_cudnn_chooses_again_where_there_is_no_plan(monkeypatch, cache):
    """In less memory than what it found fastest works in."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(algorithms, "_tried", {})
    monkeypatch.setattr(algorithms, "_rooms", {})
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(4))).to(CUDA)
    x = torch.randn(64, 64, 96, 96, device=CUDA)
    graph = recoup.plan(model, x, 1.0, compile="eager", cache=cache).graph
    budget = recoup.solve(graph, None, "min-memory").peak_bytes - 2**26
    recoup.optimize(model, budget=budget, compile="eager", cache=cache, time_limit=5)
    assert measure_peak(lambda: step(model, x), CUDA) <= budget
    assert algorithms._rooms
    before, after = (
        max(op.workspace for op in one.ops if "convolution" in op.id) for one in (graph, recoup.plans(model)[0].graph)
    )
    assert after < before


@pytest.mark.parametrize("name", CASES)
def test_dtr_same_numbers_within_the_budget(monkeypatch, name):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    make, data = CASES[name]
    model, x = well_conditioned(make()).to(CUDA), data().to(CUDA)
    exact = train(copy.deepcopy(model).double(), x.double())[1]
    plain = copy.deepcopy(model)
    theirs = train(plain, x)
    with recoup.dtr("100GiB") as run:
        train(plain, x)
    budget = int(SHARE * run.report.wanted_bytes)
    del plain
    torch.cuda.empty_cache()
    with recoup.dtr(budget) as run:
        ours = train(model, x)
    assert run.report.evictions > 0
    assert_near(ours[1], exact, theirs[1])
    assert ours[0] == pytest.approx(theirs[0], rel=TOLERANCE)
    assert ours[3] == theirs[3]
    assert run.report.peak_bytes <= budget or run.report.exceeded
