"""Plans that C++ follows without Python, and programs that leave their course while it does."""

import copy
import gc
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import recoup
from recoup.online import plans, writing
from recoup.torch.models import DenseNet
from tests.counting import counted, counter, learn_workspaces, listen
from tests.torch_helpers import assert_same, state

pytestmark = pytest.mark.usefixtures("one_thread")

PATIENCE = 120.0  # seconds until a plan must be followed
SGD = partial(torch.optim.SGD, lr=1e-3, momentum=0.9, foreach=True)


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

    def __init__(self, make=SGD, clips=False, drops=False):
        torch.manual_seed(0)
        self.x = torch.randn(8, 8, 16, 16)
        self.clips, self.drops = clips, drops
        plain = Net()
        self.twins = [(twin, make(twin.parameters())) for twin in (plain, copy.deepcopy(plain))]
        self.taken = []
        self.seen = []

    def go(self, odd=None):
        self.taken.append(odd)
        self.seen.append(self._step(*self.twins[1], odd))

    def _step(self, net, optimizer, odd):
        torch.manual_seed(len(self.taken))
        x = functional.dropout(self.x) if self.drops else self.x
        try:
            seen = net(x, odd)
        except Half:
            return None
        numbers = [one.item() if isinstance(one, torch.Tensor) else one for one in seen]
        seen[-1].backward()
        if self.clips:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=True)
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

    def until_alone(self, run, odd=None):
        """Train until C++ follows a plan; or Python, if the plan draws a mask again, which C++ cannot."""
        begin = time.perf_counter()
        while not run._journal._watch.obeys:
            if self.drops and run.report.followed > 5 and not run._learner._can_go_alone:
                return
            assert time.perf_counter() - begin < PATIENCE, "no plan was followed without Python"
            self.go(odd)

    def check(self):
        """The plain twin takes the same steps, and ends at the same bits."""
        (plain, optimizer), (ours, _) = self.twins
        taken, self.taken = self.taken, []
        for odd, seen in zip(taken, self.seen, strict=True):
            self.taken.append(odd)
            assert self._step(plain, optimizer, odd) == seen
        assert_same(state(ours), state(plain), "alone")


@pytest.fixture(autouse=True)
def seen_in_cpp(monkeypatch):
    monkeypatch.setattr(plans, "_SECONDS", 3.0)
    learn_workspaces(monkeypatch)
    with counted(monkeypatch):
        yield


@pytest.fixture
def training():
    return Training()


@pytest.fixture
def asked(monkeypatch):
    return listen(monkeypatch)


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


@pytest.mark.parametrize(
    "options",
    [
        {"make": partial(torch.optim.Adam, lr=1e-3, foreach=True)},
        {"make": partial(torch.optim.AdamW, lr=1e-3, fused=True)},
        {"clips": True},
        {"drops": True},
    ],
    ids=["foreach", "fused", "clips", "drops"],
)
def test_steps_that_write_to_what_could_be_made_again(options):
    """Lists of gradients, a mask that is drawn in place: given up when they are written to."""
    training = Training(**options)
    with recoup.dtr(training.budget(), device="cpu") as run:
        training.until_alone(run)
        for odd in (None, half, None, None, another, None):
            training.go(odd)
        assert run.report.peak_bytes <= run.report.budget_bytes
    training.check()


def test_a_total_over_steps(training):
    """It is made in the block, known to Python, and written to in steps that Python does not see."""
    with recoup.dtr(training.budget(), device="cpu") as run:
        total = torch.ones(64, 64)

        def adds(net, x, held, seen):
            total.mul_(1.01)
            return x

        training.until_alone(run, adds)
        for _ in range(3):
            training.go(adds)
            training.go(half)
    plain = torch.ones(64, 64)
    for _ in range(training.taken.count(adds)):
        plain.mul_(1.01)
    assert torch.equal(total, plain)


def test_inputs_that_die_with_what_was_made_from_them(training):
    """Their death is told to Python, which asks back."""
    budget = training.budget()
    batches, others = [torch.randn(8, 8, 16, 16) for _ in range(500)], []
    with recoup.dtr(budget + sum(one.nbytes for one in batches), device="cpu") as run:
        begin, alone = time.perf_counter(), 0
        while alone < 5:
            assert time.perf_counter() - begin < PATIENCE, "no plan was followed without Python"
            training.x = batches.pop()
            others.append(torch.zeros(8, 8, 16, 16))  # in its place, so that there is no more room
            training.go()
            alone += run._journal._watch.obeys


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


def test_gradients_that_are_added_in_place_once_nobody_holds_them(asked):
    """Autograd adds into a new tensor as long as Python has books of the first one."""
    torch.manual_seed(0)
    net = DenseNet(layers=(6, 12), growth=4)
    optimizer = SGD(net.parameters())
    x, y = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))

    def step():
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    counter().reset_peak()
    step()
    with recoup.dtr(int(0.8 * counter().peak()), device="cpu") as run:
        begin = time.perf_counter()
        while run.report.followed < 5:
            assert time.perf_counter() - begin < PATIENCE, "no plan was followed"
            step()
        asked.clear()
        step()
        assert asked == []


def test_a_plan_that_counted_on_more_room_than_there_is(training, monkeypatch):
    """Something is always evicted beside it, until another one is made for less."""
    honest = writing.Writer.graph
    budget = training.budget()

    def understated(self):
        graph = honest(self)
        return replace(graph, resident_bytes=graph.resident_bytes - budget // 40)

    monkeypatch.setattr(writing.Writer, "graph", understated)
    with recoup.dtr(budget, device="cpu") as run:
        training.until_alone(run)
        assert run._learner._plans._spared > 0
        for odd in (None, half, None, None):
            training.go(odd)
        assert run.report.peak_bytes <= run.report.budget_bytes
    training.check()


class Chain:
    """A chain of one operator after the other, each result as large as the input, and parameters that are small."""

    def __init__(self, layers):
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(128)) for _ in range(layers)]
        self.x = torch.randn(128, 128)
        self.go()
        self.go()
        gc.collect()
        self.before = counter().allocated()
        counter().reset_peak()
        self.go()
        self.peak = counter().peak()

    def go(self, look=None):
        y, results = self.x, []
        for parameter in self.parameters:
            y = torch.tanh(y * parameter + 0.1)
            results.append(y)
            if look is not None and len(results) == 13:
                look(results)
        del results
        y.square().mean().backward()
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.sub_(parameter.grad * 1e-3)
        for parameter in self.parameters:
            parameter.grad = None


def test_what_is_brought_back_beside_the_plan_counts():
    chain = Chain(24)
    budget = (chain.before + chain.peak) // 2
    with recoup.dtr(budget, device="cpu", limit=None) as run:
        begin = time.perf_counter()
        while not run._journal._watch.obeys:
            assert time.perf_counter() - begin < PATIENCE, "no plan was followed without Python"
            chain.go()
        counter().reset_peak()
        chain.go(lambda results: [one.as_strided((128, 128), (1, 128)) for one in results[:4]])
        assert counter().peak() <= budget


def test_a_step_without_a_plan_that_keeps_more_every_time():
    """All fits at first, and nothing is written down. What is kept then must not keep the rest from being evicted."""
    chain = Chain(16)
    kept = []
    with recoup.dtr(chain.peak + (chain.peak - chain.before) // 4, device="cpu", limit=None) as run:
        for _ in range(60):
            chain.go()
        assert run._learner.familiar
        counter().reset_peak()
        for _ in range(18):
            chain.go(lambda results: kept.append(results[-1].detach().clone()))
        assert counter().peak() <= run.report.budget_bytes
        kept.clear()


def test_a_view_that_reads():
    """A user's operator may say that it only looks, and read what it looks at all the same."""
    library = torch.library.Library("recoup_tests", "FRAGMENT")
    library.define("part(Tensor(a) x) -> Tensor(a)")
    library.impl("part", lambda x: x[:8] if x[0, 0].item() > 0 else x[8:16], "CPU")
    x = torch.randn(256, 256)
    plain = [(x * 1.5 * scale).tanh() for scale in range(1, 9)]
    with recoup.dtr(counter().allocated() + 5 * x.nbytes, device="cpu") as run:
        for _ in range(4):
            results = [(x * 1.5 * scale).tanh() for scale in range(1, 9)]
            for ours, theirs in zip(results, plain, strict=True):
                assert (
                    torch.ops.recoup_tests.part(ours).sum() == (theirs[:8] if theirs[0, 0] > 0 else theirs[8:16]).sum()
                )
            del results, ours
        assert run.report.evictions > 0


def test_a_batch_that_dies_with_a_plan_that_was_left_is_forgotten(training):
    """Else what is short of memory would look for news of it for ever."""

    def changed():
        training.x = training.x.clone()  # the program holds no other

    with recoup.dtr(training.budget(), device="cpu") as run:
        for _ in range(2):
            changed()
            training.until_alone(run)
            training.go(half)
            changed()
            gc.collect()
            run._journal.read()
            assert run._journal._died == {}
        with pytest.raises(recoup.BudgetError):
            torch.zeros(run.report.budget_bytes // 4)
    training.check()


def test_results_that_are_kept_beyond_their_step_with_the_batches_they_came_from():
    """The batch of a step whose plan was left must be there until all of it was read."""
    parameters = [nn.Parameter(torch.randn(64, 64) / 8) for _ in range(8)]
    optimizer = SGD(parameters)
    start = torch.randn(2048, 64)

    def batch(seed):
        return torch.from_numpy(np.random.RandomState(seed).randn(2048, 64).astype("f"))

    def step(seed, kept=None):
        x = batch(seed)
        first = x * 2.0
        y = start @ parameters[0] + first
        for parameter in parameters[1:]:
            y = torch.tanh(y @ parameter)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        last = parameters[0].detach() * 3.0
        if kept is not None:
            kept.append((first, last))

    step(0)
    step(0)
    gc.collect()
    before = counter().allocated()
    counter().reset_peak()
    step(0)
    kept = []
    with recoup.dtr(int(before + 0.6 * (counter().peak() - before)), device="cpu", limit=None) as run:
        begin = time.perf_counter()
        while not run._journal._watch.obeys:
            assert time.perf_counter() - begin < PATIENCE, "no plan was followed without Python"
            step(0)
        for _ in range(4):
            step(0)
        for seed in range(3):
            step(seed, kept)
        for seed, (first, _) in enumerate(kept):
            assert torch.equal(first, batch(seed) * 2.0)
    assert run.report.peak_bytes <= run.report.budget_bytes
