"""DTR that learns: a program that repeats its step follows a plan, and nothing else changes."""

import copy
import time

import pytest
import torch
from torch import nn

import recoup
from recoup.online import learner
from recoup.torch.models import MODELS, example
from tests.torch_helpers import assert_same, state

pytestmark = pytest.mark.usefixtures("one_thread", "quick_planner")

PATIENCE = 60.0  # seconds until a plan must be there


class Net(nn.Module):
    """Convolutions with everything that is hard to repeat: batch norm, dropout, operators in place."""

    def __init__(self, layers=6, width=8):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Dropout(0.1)
            )
            for _ in range(layers)
        )

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Training:
    """Twins: one trains under DTR, the other takes the same steps afterwards."""

    def __init__(self, model, x, loss=lambda out: out, optimizer=torch.optim.Adam, share=0.6, **options):
        self.plain, self.ours, self.loss = model, copy.deepcopy(model), loss
        self.optimizers = {twin: optimizer(twin.parameters(), 1e-3) for twin in (self.plain, self.ours)}
        self.taken = []
        self.x = x
        with recoup.dtr("64GiB", device="cpu", learn=False) as run:
            self.go(2)
        self.run = recoup.dtr(int(share * run.report.wanted_bytes), device="cpu", **options)

    def go(self, count=1, x=None, learns=True):
        """Train, or only look at the data."""
        for _ in range(count):
            self.taken.append((len(self.taken), self.x if x is None else x, learns))
            self._step(self.ours, *self.taken[-1])

    def _step(self, twin, seed, x, learns):
        torch.manual_seed(seed)
        with torch.set_grad_enabled(learns):
            loss = self.loss(twin(*x))
        if learns:
            loss.backward()
            self.optimizers[twin].step()
            self.optimizers[twin].zero_grad()

    def until_followed(self, count):
        """Train until so many more steps have followed a plan."""
        goal = self.run.report.followed + count
        begin = time.perf_counter()
        while self.run.report.followed < goal:
            assert time.perf_counter() - begin < PATIENCE, "no plan was followed"
            self.go()

    def check(self):
        """The plain twin takes the same steps, and ends at the same bits."""
        for taken in self.taken:
            self._step(self.plain, *taken)
        assert_same(state(self.ours), state(self.plain), "learned")
        assert self.run.report.peak_bytes <= self.run.report.budget_bytes


@pytest.fixture
def quick_planner(monkeypatch):
    monkeypatch.setattr(learner, "_SECONDS", 3.0)


def images(count):
    return torch.randn(count, 3, 32, 32)


@pytest.fixture
def training():
    torch.manual_seed(0)
    return Training(Net(), (images(8),))


def test_a_step_that_repeats_follows_a_plan(training):
    with training.run as run:
        training.until_followed(2)
        report = run.report
        searched, evicted, repeated = report.search_seconds, report.evictions, report.rematerializations
        training.go(3)
        assert report.followed >= 4
        assert report.search_seconds == searched  # nothing was left to choose
        assert report.evictions > evicted
        assert report.rematerializations > repeated
    assert "steps followed a plan" in str(report)
    training.check()


def test_a_program_that_deviates_is_on_its_own_until_it_comes_back(training):
    with training.run as run:
        training.until_followed(1)
        followed = run.report.followed
        training.go(1, x=(images(4),))
        training.go(1, learns=False)
        assert run.report.followed <= followed + 1
        training.until_followed(2)
    training.check()


def test_without_learning_no_plan_is_made():
    torch.manual_seed(0)
    training = Training(Net(), (images(8),), learn=False)
    with training.run as run:
        training.go(12)
    assert run.report.followed == 0
    assert run.report.evictions > 0
    training.check()


def test_a_block_may_end_while_a_plan_is_made(training):
    with training.run as run:
        begin = time.perf_counter()
        while run._learner._planning is None and time.perf_counter() - begin < PATIENCE:
            training.go()
        planning = run._learner._planning
    assert planning.done
    training.check()


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_every_model_follows_its_plan(name):
    torch.manual_seed(0)
    made = example(name)
    training = Training(made.model, made.inputs, made.loss, torch.optim.SGD, share=0.8)
    with training.run:
        training.until_followed(3)
    training.check()
