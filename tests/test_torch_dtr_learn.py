"""DTR that learns: a program that repeats its step follows a plan, and nothing else changes."""

import copy
import gc
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import recoup
from recoup.online import plans
from recoup.online.adapter import storage_of
from recoup.online.calls import flat_tensors
from recoup.torch.memory import live_tensors
from recoup.torch.models import MODELS, example
from tests.torch_helpers import assert_same, state

pytestmark = pytest.mark.usefixtures("one_thread", "seen", "quick_planner")

PATIENCE = 120.0  # seconds until a plan must be there


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
    monkeypatch.setattr(plans, "_SECONDS", 3.0)


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
        while not run._learner._plans.under_way and time.perf_counter() - begin < PATIENCE:
            training.go()
        planning = run._learner._plans._planning
    assert planning.done
    training.check()


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_every_model_follows_its_plan(name):
    torch.manual_seed(0)
    made = example(name)
    share = 0.8
    while True:
        training = Training(copy.deepcopy(made.model), made.inputs, made.loss, torch.optim.SGD, share=share)
        try:
            with training.run:
                training.until_followed(3)
            break
        except recoup.BudgetError:  # both twins' parameters may be most of it
            del training  # what it holds would count for the next one
            gc.collect()
            share *= 1.05
    training.check()


class Allocator(TorchDispatchMode):
    """Counts the bytes of all storages, as a device's own allocator would."""

    def __init__(self, keeper):
        super().__init__()
        self._keeper, self._storages = keeper, {}
        keeper.can_look, keeper.look = True, self.look

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.see(flat_tensors((result,), []))
        return result

    def see(self, tensors):
        for storage in (storage_of(tensor) for tensor in tensors if tensor.layout == torch.strided):
            self._storages[storage._cdata] = weakref.ref(storage)

    def look(self):
        if not self._storages:
            self.see(live_tensors())
        there = [storage for reference in self._storages.values() if (storage := reference()) is not None]
        there += [content.own for content in self._keeper._pool.living() if content.own is not None]
        self._keeper.memory = sum(
            storage.nbytes() for storage in {storage._cdata: storage for storage in there}.values()
        )


@pytest.mark.by_tensors
class TestFamiliarSteps:
    """Operators that pass at a glance: for devices whose allocator counts."""

    @pytest.fixture
    def counting(self, training):
        with Allocator(training.run._keeper):
            yield training

    def familiar(self, training):
        """Train until a step is familiar."""
        begin = time.perf_counter()
        while not training.run._learner.familiar:
            assert time.perf_counter() - begin < PATIENCE, "no step became familiar"
            training.go()

    def test_with_room_all_pass_but_the_first(self):
        torch.manual_seed(0)
        training = Training(Net(), (images(8),), share=1.05)
        with Allocator(training.run._keeper), training.run as run:
            self.familiar(training)
            calls = run._calls
            training.go(5)
            assert run._calls == calls + 5
            assert run.report.evictions == 0
        training.check()

    def test_what_may_be_written_over_unseen_is_not_made_again(self):
        """The first operator of a step never passes, but those after it, which may write over its result, do."""
        x = torch.linspace(-1, 1, 1024)
        run = recoup.dtr("1GiB", device="cpu")

        def step():
            y = x * 3
            for number in range(40):
                y = y + number if number % 2 else y.relu_()
                if run._learner.familiar:
                    assert run._keeper._pool.victim(run._keeper.clock) is None

        with Allocator(run._keeper), run:
            while not run._learner.familiar:
                step()
            step()
            assert run._learner.familiar

    def test_what_the_plan_repeats_is_known_and_the_rest_passes(self, counting):
        with counting.run as run:
            self.familiar(counting)
            counting.go(1)
            calls, followed, repeated = run._calls, run.report.followed, run.report.rematerializations
            counting.go(4)
            assert run.report.followed >= followed + 3
            assert run.report.rematerializations > repeated
            assert 0 < (run._calls - calls) / 4 < 0.7 * len(run._learner._step)
        counting.check()

    def test_deviations_in_the_middle_change_nothing(self, counting):
        with counting.run:
            for odd in ((1, (images(4),), True), (1, None, False), (2, (images(8),), True)):
                self.familiar(counting)
                counting.go(*odd)
                try:  # the program ends a step half-way
                    counting.go(1, x=(images(8), "too many"))
                except TypeError:
                    counting.taken.pop()
                counting.go(2)
        counting.check()
