"""Plans that C++ follows without Python, and programs that leave their course while it does."""

import copy
import gc
import time

import pytest
import torch
from torch import nn
from torch.nn import functional

import recoup
from recoup.online import learner, runtime
from tests.counting import counted, counter
from tests.torch_helpers import assert_same, state

pytestmark = pytest.mark.usefixtures("one_thread")

PATIENCE = 60.0  # seconds until a plan must be followed


class Half(Exception):  # noqa: N818
    """Ends a step in the middle."""


class Net(nn.Module):
    """In place, over others, through views, with statistics, and with values that Python holds for a while."""

    def __init__(self, layers=10, width=8):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(layers))
        self.register_buffer("shift", torch.full((width, 1, 1), 0.1))

    def forward(self, x, odd=None):
        held, seen = [], []
        before = x
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            if number == 6 and odd is not None:
                x = odd(self, x, held, seen)
            x = functional.relu(norm(convolution(x)), inplace=True)
            x = x - self.shift
            held.append(x.detach() * 2)
            left, right = torch.tanh(x).chunk(2, 1)
            x = torch.cat([right.sigmoid(), left * 1.5], 1)
            x.add_(before)
            before = x
        seen.append(x.square().mean() + sum(one.mean() for one in held))
        return seen


class Training:
    """Twins: one trains under DTR, the other takes the same steps afterwards."""

    def __init__(self):
        torch.manual_seed(0)
        self.x = torch.randn(8, 8, 16, 16)
        plain = Net()
        self.twins = [
            (twin, torch.optim.SGD(twin.parameters(), lr=1e-3, momentum=0.9, foreach=True))
            for twin in (plain, copy.deepcopy(plain))
        ]
        self.taken = []
        self.seen = []

    def go(self, odd=None):
        self.taken.append(odd)
        self.seen.append(self._step(*self.twins[1], odd))

    def _step(self, net, optimizer, odd):
        try:
            seen = net(self.x, odd)
        except Half:
            return None
        numbers = [one.item() if isinstance(one, torch.Tensor) else one for one in seen]
        seen[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        return numbers

    def budget(self, share=0.65):
        """That share of what a step takes above what is there before it."""
        self.go()
        self.go()
        gc.collect()
        before = counter().allocated()
        counter().reset_peak()
        self.go()
        return int(before + share * (counter().peak() - before))

    def until_alone(self, run):
        """Train until C++ follows a plan."""
        begin = time.perf_counter()
        while not run._journal._watch.obeys:
            assert time.perf_counter() - begin < PATIENCE, "no plan was followed without Python"
            self.go()

    def check(self):
        """The plain twin takes the same steps, and ends at the same bits."""
        (plain, optimizer), (ours, _) = self.twins
        assert [self._step(plain, optimizer, odd) for odd in self.taken] == self.seen
        assert_same(state(ours), state(plain), "alone")


@pytest.fixture
def training(monkeypatch):
    monkeypatch.setattr(learner, "_SECONDS", 3.0)
    with counted(monkeypatch):
        yield Training()


@pytest.fixture
def asked(monkeypatch):
    seen = []
    run = runtime.Runtime._run

    def listen(self, func, args, kwargs):
        seen.append(str(func))
        return run(self, func, args, kwargs)

    monkeypatch.setattr(runtime.Runtime, "_run", listen)
    return seen


def test_nothing_comes_to_python_and_the_budget_holds(training, asked):
    with recoup.dtr(training.budget(), device="cpu") as run:
        training.until_alone(run)
        gc.collect()
        counter().reset_peak()
        before = copy.copy(run.report)
        asked.clear()
        for _ in range(4):
            training.go()
        assert asked == []
        assert counter().peak() <= run.report.budget_bytes
        training.go()  # what was done is told when the step turns
        assert run.report.followed == before.followed + 5
        assert run.report.evictions - before.evictions >= 5
        assert run.report.rematerializations - before.rematerializations >= 5
        assert run.report.remat_seconds > before.remat_seconds
    training.check()


def half(net, x, held, seen):
    raise Half


def another(net, x, held, seen):
    return x * 1.5


def looks(net, x, held, seen):
    seen.append(sum(x.detach().flatten()[:5].tolist()))
    return x


def gives_out(net, x, held, seen):
    seen.append(float(x.detach().numpy().sum()))
    return x


def reads_what_it_held(net, x, held, seen):
    seen.extend(one.sum().item() for one in held)
    return x


def lets_go(net, x, held, seen):
    held.clear()
    return x


def lets_go_and_stops(net, x, held, seen):
    held.clear()
    del x
    raise Half


def writes(net, x, held, seen):
    with torch.no_grad():
        net.shift.mul_(0.5)
    return x


@pytest.mark.parametrize(
    "odd", [half, another, looks, gives_out, reads_what_it_held, lets_go, lets_go_and_stops, writes]
)
def test_programs_that_leave_their_course(training, odd):
    with recoup.dtr(training.budget(), device="cpu") as run:
        for _ in range(2):
            training.until_alone(run) if run._learner._can_go_alone else training.go()
            training.go(odd)
            training.go()
            training.go()
        assert run.report.peak_bytes <= run.report.budget_bytes
    training.check()


def test_python_follows_the_plan_where_the_program_gives_tensors_out(training):
    """In every step, and the plan was made for that."""

    with recoup.dtr(training.budget(), device="cpu") as run:
        begin = time.perf_counter()
        while run.report.followed < 8:
            assert time.perf_counter() - begin < PATIENCE, "no plan was followed"
            training.go(looks)
        followed = run.report.followed
        for _ in range(5):
            training.go(looks)
        assert run.report.followed == followed + 5
    training.check()
