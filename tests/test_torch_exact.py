"""Eager mode changes no bit: losses, gradients, buffers and random state over three optimizer steps, for every model.

A selection runs by default; all models at three budgets with ``pytest -m full tests/test_torch_exact.py``.
"""

import copy

import pytest
import torch

import recoup
from recoup.torch.models import MODELS, example
from tests.torch_helpers import QUICK, Trainer, assert_same, call, repeats, tight

pytestmark = pytest.mark.usefixtures("one_thread")

SELECTION = ("mobilenet-v2", "unet", "gpt", "vit", "lstm", "segnet")  # norms, dropout, tied weights, cells, unpooling
SHARES = {1.0: 0.0, 0.6: 0.002, 0.25: 0.002}
"""How far from the smallest budget to the plain peak, and slack for what becomes resident after the first step."""


def optimizer(name, model):
    """Momentum for some, Adam for others."""
    if list(MODELS).index(name) % 2:
        return torch.optim.Adam(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(name, model, made, autocast=False):
    """What three steps leave, the last over two batches."""
    trainer = Trainer(model, optimizer(name, model), made.loss, autocast)
    again = tuple(tensor.flip(0) for tensor in made.inputs)
    batches = ([made.inputs], [made.inputs], [made.inputs, again])
    return [trainer.step(*each, seed=number) for number, each in enumerate(batches)]


NOTHING_TO_SAVE = ("vgg16", "vgg19", "fcn8")  # this small, the first convolution's backward is the whole peak


def check(name, share, cache, autocast=False):
    """Under autocast against the same graph with nothing recomputed: what AOTAutograd traces has no cache of casts."""
    torch.manual_seed(0)
    made = example(name)
    model, plain = copy.deepcopy(made.model), copy.deepcopy(made.model)
    if autocast:
        recoup.optimize(plain, budget="1TiB", cache=cache, **{**QUICK, "planner": "checkpoint-all"})
    theirs = train(name, plain, made, autocast)
    del plain
    grows = 3 * sum(parameter.numel() for parameter in model.parameters())
    ballast = torch.zeros(grows)  # optimizer state and gradients, so that the budget is one for the later steps too

    def step(*inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return call(model, inputs)

    fraction = tight(step, made.inputs, share, cache, SHARES[share] + 0.1 * autocast)
    del ballast
    recoup.optimize(model, budget=fraction, cache=cache, **{**QUICK, "time_limit": 3.0})
    assert_same(train(name, model, made, autocast), theirs, f"{name} at {fraction:.3f}")
    # Where the CPU has no bfloat16 a convolution unfolds its input, for a small network more than all the rest.
    if share < 1 and name not in NOTHING_TO_SAVE and not (autocast and fraction == 1.0):
        assert repeats(model) > 0


@pytest.mark.parametrize("name", SELECTION)
def test_a_selection(cache, name):
    check(name, 0.25, cache)


@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_a_selection_under_autocast(cache, name):
    check(name, 0.25, cache, autocast=True)


@pytest.mark.full
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", MODELS)
def test_every_model(cache, name, share, autocast):
    check(name, share, cache, autocast)
