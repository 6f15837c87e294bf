"""The budget holds: what is predicted is what is measured, and what grows later is noticed."""

import copy
import gc
import random
import re
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

import recoup
from recoup.torch import eager, memory, session
from recoup.torch.memory import measure_peak, resident_bytes
from recoup.torch.models import GPT, VGG, ResNet, UNet
from tests.torch_helpers import QUICK, repeats, tight

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def tower(layers=6, width=16):
    """Convolutions whose activations are nearly all of the memory."""
    body = [layer for i in range(layers) for layer in (nn.Conv2d(width if i else 3, width, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))


def step(model, inputs):
    outputs = model(*inputs)
    if outputs.dim() > 0:
        classes = torch.zeros(outputs.shape[0], *outputs.shape[2:], dtype=torch.long)
        outputs = functional.cross_entropy(outputs, classes)
    outputs.backward()


CASES = {
    "resnet": (lambda: ResNet(layers=(1, 1, 1, 1), width=8, classes=10), lambda: (torch.randn(8, 3, 64, 64),)),
    "unet": (lambda: UNet(width=12, depth=2), lambda: (torch.randn(2, 3, 64, 64),)),
    "gpt": (
        lambda: GPT(vocabulary=32, length=128, layers=2, width=32, heads=2),
        lambda: (torch.randint(32, (4, 128)), torch.randint(32, (4, 128))),
    ),
    "vgg": (
        lambda: VGG(convs=(3, 3, 2, 1), width=8, hidden=16, classes=4, image=64),
        lambda: (torch.randn(8, 3, 64, 64),),
    ),
}


@pytest.mark.parametrize("share", [1.0, 0.2])
@pytest.mark.parametrize("name", CASES)
def test_the_prediction_is_what_is_measured(cache, name, share):
    torch.manual_seed(0)
    make, data = CASES[name]
    model, inputs = make(), data()
    fraction = tight(model, inputs, share, cache, slack=0.01)
    recoup.optimize(model, budget=fraction, cache=cache, **QUICK)
    step(model, inputs)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        measured = measure_peak(lambda: step(model, inputs), CPU)
        (plan,) = recoup.plans(model)
        assert measured <= plan.budget_bytes
        assert abs(plan.peak_bytes - measured) <= max(0.02 * measured, 20_000), (plan.peak_bytes, measured)
    if share < 1:
        assert repeats(model) > 0
        assert plan.peak_bytes < 0.95 * recoup.simulate(plan.graph, recoup.Schedule.default(plan.graph)).peak_bytes


def test_the_first_step_stays_within_the_budget(cache):
    torch.manual_seed(0)
    inputs = (torch.randn(8, 3, 32, 32),)
    fraction = tight(tower(), inputs, 0.2, cache, slack=0.02)
    model = tower()
    recoup.optimize(model, budget=fraction, cache=cache, **QUICK)
    recoup.optimize(tower(), budget=fraction, cache=cache, **QUICK)(*inputs)  # measured, so that no step measures
    measured = measure_peak(lambda: step(model, inputs), CPU)
    assert measured <= recoup.plans(model)[0].budget_bytes


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_what_the_optimizer_adds_is_noticed(cache, kind):
    torch.manual_seed(0)
    model, inputs = tower(), (torch.randn(8, 3, 32, 32),)
    graph = recoup.plan(model, inputs, 1.0, cache=cache, **{**QUICK, "planner": "checkpoint-all"}).graph
    plain = recoup.simulate(graph, recoup.Schedule.default(graph)).peak_bytes
    budget = recoup.plan(model, inputs, int(0.8 * plain), cache=cache, **QUICK).peak_bytes + 100  # no room to spare
    recoup.optimize(model, budget=budget, cache=cache, **QUICK)
    if kind == "momentum":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters())
    step(model, inputs)
    before = recoup.plans(model)[0]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    measured = measure_peak(lambda: step(model, inputs), CPU)
    after = recoup.plans(model)[0]
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    grown = after.graph.resident_bytes - before.graph.resident_bytes
    assert grown >= (1 if kind == "momentum" else 2) * parameters - budget // 1024 - 1
    assert after.budget_bytes == before.budget_bytes == budget
    assert measured <= budget
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step(model, inputs)
    assert recoup.plans(model)[0] is after  # nothing more grew


def test_accumulated_gradients_are_noticed(cache):
    torch.manual_seed(0)
    model, inputs = tower(), (torch.randn(8, 3, 32, 32),)
    fraction = tight(model, inputs, 0.6, cache, slack=0.02)
    budget = recoup.plan(model, inputs, fraction, cache=cache, **QUICK).peak_bytes + 100  # no room to spare
    recoup.optimize(model, budget=budget, cache=cache, **QUICK)
    step(model, inputs)
    first = recoup.plans(model)[0]
    measured = measure_peak(lambda: step(model, inputs), CPU)
    second = recoup.plans(model)[0]
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert (second is first) == (first.peak_bytes + gradients <= budget)  # a plan is kept while there is room
    assert measured <= second.budget_bytes == budget


def test_counting_holds_nothing(monkeypatch):
    """The garbage collector leaves alone what it did before, which on Python 3.12 is never nothing."""

    class Cycle:
        def __init__(self):
            self.tensor, self.me = torch.zeros(1000), self

    left_alone = gc.get_freeze_count()
    before = resident_bytes(CPU)
    held = Cycle()
    assert resident_bytes(CPU) == before + 4000
    del held
    assert resident_bytes(CPU) == before
    assert gc.get_freeze_count() == left_alone
    gc.unfreeze()
    monkeypatch.setattr(memory, "_STARTUP", 10_000)
    gc.freeze()
    try:
        held = Cycle()
        assert resident_bytes(CPU) == before + 4000
        del held
        assert resident_bytes(CPU) == before
    finally:
        gc.unfreeze()


def test_what_tracing_leaves_behind_is_not_counted(cache):
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clamp(min=0)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * (ctx.saved_tensors[0] > 0) * 0.5

    class Layer(nn.Module):
        def forward(self, x):
            return Half.apply(x)

    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), Layer())))
    plain = copy.deepcopy(model)
    x = torch.randn(512, 32)
    recoup.optimize(model, budget=2**20, cache=cache, **QUICK)
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            each(x).mean().backward()
            optimizer.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_larger_batch_is_counted(cache):
    model, budget = tower(layers=2), 2**22
    recoup.optimize(model, budget=budget, cache=cache, **QUICK)
    for batch in (2, 3, 6, 12, 64):
        x = torch.randn(batch, 3, 32, 32)
        model.zero_grad(set_to_none=True)
        try:
            model(x).sum().backward()
        except recoup.BudgetError:
            break
        model.zero_grad(set_to_none=True)
        assert measure_peak(lambda x=x: model(x).sum().backward(), CPU) <= budget
    assert batch > 3


@pytest.mark.parametrize("warm_up", [False, True])
def test_a_profiler_that_runs_is_not_disturbed(tmp_path, warm_up):
    model = recoup.optimize(tower(), budget=0.9, cache=tmp_path, **QUICK)
    x = torch.randn(2, 3, 16, 16)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1) if warm_up else None
    with torch.profiler.profile(schedule=schedule) as profiler:
        with pytest.raises(recoup.CaptureError, match="run one step before profiling"):
            model(x)
        profiler.step()
        torch.ones(1).add(1)
        profiler.step()
    assert "aten::add" in {event.key for event in profiler.key_averages()}


def test_reserve_plans_ahead(cache):
    torch.manual_seed(0)
    model, inputs = tower(), (torch.randn(8, 3, 32, 32),)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    recoup.optimize(model, budget=0.7, cache=cache, reserve=3 * parameters + 10_000, **QUICK)
    optimizer = torch.optim.Adam(model.parameters())
    plans = []
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        step(model, inputs)
        plans.append(recoup.plans(model)[0])
        optimizer.step()
    assert plans[0] is plans[1] is plans[2]
    measured = measure_peak(lambda: step(model, inputs), CPU)
    assert measured <= plans[0].budget_bytes


@pytest.mark.parametrize("kind", ["integer", "text", "fraction", "fraction as text"])
def test_budgets_as_people_write_them(cache, kind):
    torch.manual_seed(0)
    model, inputs = tower(), (torch.randn(8, 3, 32, 32),)
    budget = {"integer": 4_000_000, "text": "4MB", "fraction": 0.7, "fraction as text": "0.7"}[kind]
    recoup.optimize(model, budget=budget, cache=cache, **QUICK)
    step(model, inputs)
    (plan,) = recoup.plans(model)
    plain = recoup.simulate(plan.graph, recoup.Schedule.default(plan.graph)).peak_bytes
    if kind in ("integer", "text"):
        assert plan.budget_bytes == 4_000_000
    else:
        assert abs(plan.budget_bytes - 0.7 * plain) < 0.002 * plain
    assert plan.peak_bytes <= plan.budget_bytes
    model.zero_grad(set_to_none=True)
    assert measure_peak(lambda: step(model, inputs), CPU) <= plan.budget_bytes


def test_everything_kept_recomputes_nothing(cache):
    torch.manual_seed(0)
    model, inputs = tower(), (torch.randn(4, 3, 32, 32),)
    plan = recoup.plan(model, inputs, 1.0, cache=cache, **QUICK)
    assert len(plan.schedule) == len(plan.graph.ops)


def test_too_small_a_budget_says_which_one_works(cache):
    torch.manual_seed(0)
    model, inputs = tower(), (torch.randn(8, 3, 32, 32),)
    recoup.optimize(model, budget="1MiB", cache=cache, **QUICK)
    with pytest.raises(recoup.BudgetError, match=r"a budget of 1 MiB is not enough") as caught:
        step(model, inputs)
    text = str(caught.value)
    assert "are resident" in text
    assert "plain peak" in text
    works = re.search(r"([0-9.]+) ?MiB works", text)
    assert works, text
    assert all(parameter.grad is None for parameter in model.parameters())
    budget = int(float(works[1]) * 2**20 * 1.001)  # the text has four digits
    recoup.optimize(model, budget=budget, cache=cache, **QUICK)
    measured = measure_peak(lambda: step(model, inputs), CPU)
    assert measured <= budget


@pytest.mark.parametrize("dropout", [0, 0.1])
def test_a_budget_that_works_as_printed(cache, dropout):
    """What the message says is copied into the program as it is; replaying takes room for the generator's states."""
    torch.manual_seed(0)
    if dropout:
        layers = [layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.Dropout(dropout), nn.Tanh())]
        model, inputs = nn.Sequential(*layers), (torch.randn(512, 32),)
    else:
        model, inputs = tower(), (torch.randn(8, 3, 32, 32),)
    recoup.optimize(model, budget="300KiB", cache=cache, **QUICK)
    with pytest.raises(recoup.BudgetError) as caught:
        step(model, inputs)
    printed = re.search(r"([0-9.]+ ?[KM]iB) works", str(caught.value))
    assert printed
    recoup.optimize(model, budget=printed[1], cache=cache, **QUICK)
    step(model, inputs)
    assert recoup.plans(model)[0].budget_bytes > 400 * 1024


def test_room_for_a_loss_outside_is_named_where_it_is_what_does_not_fit(cache):
    model, x = nn.Linear(16, 1024), torch.randn(256, 16)
    y = torch.randint(0, 1024, (256,))
    budget = "3.5MiB"  # of it 1 MiB for the logits, and as much for their gradient

    def loss(x, y):
        return nn.functional.cross_entropy(model(x), y)

    recoup.optimize(loss, budget=budget, cache=cache, **QUICK)(x, y).backward()
    recoup.optimize(model, budget=budget, cache=cache, **QUICK)
    with pytest.raises(recoup.BudgetError, match=r"works; 3 MiB of that are room for a loss outside.* the loss inside"):
        model(x)


def test_what_has_no_memory_of_its_own_is_passed_over(cache):
    others = [nn.LazyLinear(4), torch.nested.nested_tensor([torch.randn(5, 2), torch.randn(9, 2)], layout=torch.jagged)]
    model = recoup.optimize(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), budget="10MB", cache=cache, **QUICK)
    model(torch.randn(4, 8)).sum().backward()
    assert len(others) == 2


def test_growing_lists_of_an_optimizer_are_noticed(cache):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
    x = torch.randn(64, 64)
    recoup.optimize(model, budget="100MB", cache=cache, **QUICK)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=50)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - x.sin()).square().mean()
        loss.backward()
        return loss

    size = sum(parameter.nbytes for parameter in model.parameters())
    seen = []
    for _ in range(3):
        optimizer.step(closure)
        model(x)
        seen.append(model._compiled_call_impl._recoup_session.resident(CPU, [x]))
    assert seen[2] - seen[0] > 4 * size


def test_accumulating_gradients_does_not_look_at_every_object(cache, monkeypatch):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    recoup.optimize(model, budget="10MB", cache=cache, **QUICK)
    scans, look = [], session.resident_bytes
    monkeypatch.setattr(session, "resident_bytes", lambda device: scans.append(1) or look(device))
    for step in range(4):
        model(x).sum().backward()
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)
        if step == 1:
            before = len(scans)
    assert len(scans) == before > 0


def test_planning_draws_no_random_numbers(cache):
    model = recoup.optimize(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), budget="10MB", cache=cache, **QUICK)
    drawn, states = random.getstate(), torch.get_rng_state()
    compile_step = eager.compile_step
    with mock.patch.object(eager, "compile_step", lambda *args: (random.random(), compile_step(*args))[1]):
        model(torch.randn(4, 8, generator=torch.Generator())).sum().backward()
    assert random.getstate() == drawn
    assert torch.equal(torch.get_rng_state(), states)


def test_an_optimizer_may_keep_its_state_as_it_likes(cache):
    model = recoup.optimize(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), budget="10MB", cache=cache, **QUICK)

    class Counts(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.state["steps"] = [torch.zeros(3)]

    optimizer = Counts(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    assert len(optimizer.state["steps"]) == 1


class OfNoHash(type):
    """A metaclass whose classes cannot be in a set."""

    def __eq__(cls, other):
        return False

    __hash__ = None


class Anything(metaclass=OfNoHash):
    """An object of such a class."""

    def __init__(self):
        self.things = []


class Refuses(torch.Tensor):
    """It does not even say where it is."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


def test_whatever_else_lives_is_no_obstacle(tmp_path):
    beside = [Anything(), torch.zeros(8).as_subclass(Refuses), torch.autograd.profiler.profile(enabled=False)]
    model, x = tower(), torch.randn(4, 3, 16, 16)
    recoup.optimize(model, budget=1.0, cache=tmp_path, **QUICK)
    step(model, (x,))
    assert len(beside) == 3
    assert len(recoup.plans(model)) == 1
