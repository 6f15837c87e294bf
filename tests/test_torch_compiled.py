"""Compiled mode against the plain compiled step: same numbers, same buffers, within budget, nothing left behind."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering

import recoup
from recoup.torch import compiled, measuring, planning, session
from recoup.torch.compiled import _as_measured
from recoup.torch.corrections import Corrections
from recoup.torch.memory import measure_peak, resident_bytes
from recoup.torch.models import MODELS, example
from recoup.torch.store import Store
from recoup.units import parse_bytes
from tests.torch_helpers import QUICK, repeats, well_conditioned

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGET = 0.75
CPU = torch.device("cpu")
NOTHING = 1e-5  # torch.testing's for float32: a bias before batch norm has a gradient of zero, but for rounding
BATCH = 32  # so that activations outweigh parameters
COMPILED = {**QUICK, "compile": "inductor"}


def blocks(count: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
        for _ in range(count)
    ]
    return nn.Sequential(*layers)


def run(model, x, steps: int = 2) -> list[float]:
    losses = []
    for seed in range(steps):
        torch.manual_seed(seed)
        model.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def test_as_the_plain_compiled_step(tmp_path):
    model = blocks()
    plain = copy.deepcopy(model)
    x = torch.randn(1024, 32)
    recoup.optimize(model, budget=BUDGET, cache=tmp_path, **COMPILED)
    assert run(model, x) == pytest.approx(run(torch.compile(plain), x), rel=1e-5)
    assert repeats(model) > 0
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    for (name, ours), (_, theirs) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
    assert int(model[0][1].num_batches_tracked) == 2
    plan = recoup.plans(model)[0]
    model.zero_grad(set_to_none=True)
    plain.zero_grad(set_to_none=True)  # were not there when the plan was made
    measured = measure_peak(lambda: model(x).square().mean().backward(), torch.device("cpu"))
    assert measured <= plan.budget_bytes


@torch.library.custom_op("recoup_tests::scratched", mutates_args=())
def scratched(x: torch.Tensor) -> torch.Tensor:
    """A kernel that Inductor knows nothing about, with a workspace of eight times its input."""
    x.new_empty(8 * x.numel())
    return x.clone()


scratched.register_fake(torch.empty_like)


class Scratched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return scratched(gradient)


class Gated(nn.Module):
    """Two products, whose gradients are there at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.left(x).tanh() * self.right(x).tanh()


@pytest.mark.usefixtures("nothing_compiled")
def test_no_dead_buffer_is_kept_for_a_later_one(tmp_path, monkeypatch):
    """Inductor would, across a kernel whose workspace it does not know."""
    torch.manual_seed(0)
    body = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    before, reuse = nn.Sequential(Gated(), Gated()), inductor_config.allow_buffer_reuse
    tried, measure = [], compiled._measured
    monkeypatch.setattr(compiled, "_measured", lambda *args: tried.append(measure(*args)) or tried[-1])
    monkeypatch.setattr(compiled, "PLAIN", 0.0)  # never PyTorch's own split
    planned = []
    monkeypatch.setattr(compiled, "_as_measured", lambda plan, peak: planned.append(plan) or _as_measured(plan, peak))

    @recoup.optimize(budget="1GiB", cache=tmp_path, **COMPILED)
    def step(x):
        return body(Scratched.apply(before(x))).square().mean()

    step(torch.randn(1024, 64)).backward()
    assert sum(tried[0][:2]) == pytest.approx(planned[0].peak_bytes, abs=30_000)  # of 121,536 that would be kept
    assert inductor_config.allow_buffer_reuse == reuse


class Writes(nn.Module):
    """A forward that writes to a buffer after reading it, and to a parameter."""

    def __init__(self):
        super().__init__()
        self.body = blocks()
        self.register_buffer("scale", torch.tensor(2.0))
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        y = self.body(x * self.weight) * (self.scale * 3)
        self.scale.mul_(0.5)
        with torch.no_grad():
            self.weight.mul_(0.5)
        return y


def test_writes_happen_once_and_trying_out_leaves_no_trace(tmp_path):
    torch.manual_seed(0)
    model = Writes()
    x = torch.randn(1024, 32)
    recoup.optimize(model, budget=BUDGET, cache=tmp_path, **COMPILED)
    state = torch.get_rng_state()
    loss = model(x).square().mean()
    assert float(model.scale) == 1.0
    assert float(model.weight.detach()) == 0.5
    assert not torch.equal(torch.get_rng_state(), state)  # dropout drew once, as the plain step does
    loss.backward()
    assert all(int(buffer) == 1 for name, buffer in model.named_buffers() if name.endswith("num_batches_tracked"))


@pytest.mark.usefixtures("nothing_compiled")
def test_a_plan_is_compiled_once_and_has_the_peak_that_was_measured(tmp_path, monkeypatch):
    """However often corrections lead to it."""
    asked, tried = [], []
    follow, measure = Corrections.next, compiled._measured

    def stay(self, planned, error, fits, margin):
        asked.append(fits)
        return planned - 1 if fits else follow(self, planned, error, fits, margin)

    monkeypatch.setattr(Corrections, "next", stay)
    monkeypatch.setattr(planning, "known_by", lambda graph: "as before, if that fits")
    monkeypatch.setattr(compiled, "_measured", lambda *args: tried.append(args) or measure(*args))
    monkeypatch.setattr(compiled, "CLOSE", -1.0)  # it is never close
    monkeypatch.setattr(compiled, "MUCH", -1.0)  # and always worth more attempts
    model = blocks()
    recoup.optimize(model, budget=BUDGET, cache=tmp_path, **COMPILED)
    run(model, torch.randn(1024, 32), steps=1)
    assert len(asked) == compiled.MOST_ATTEMPTS
    assert len(tried) == asked.count(False) + 1
    plan = recoup.plans(model)[0]
    for more in (-4096, 0, 4096):
        assert _as_measured(plan, plan.peak_bytes + more).peak_bytes == plan.peak_bytes + more


@pytest.mark.usefixtures("nothing_compiled")
def test_a_plan_that_comes_again_costs_no_attempt_as_long_as_nothing_fits(tmp_path, monkeypatch):
    tried, asked = [], []
    monkeypatch.setattr(planning, "known_by", lambda graph: "as before, if that fits")
    monkeypatch.setattr(Corrections, "next", lambda self, planned, *rest: asked.append(planned) or planned - 1)
    monkeypatch.setattr(compiled, "_measured", lambda *args: tried.append(args) or (0, 2**40, 1.0))
    monkeypatch.setattr(compiled, "PLAIN", 0.0)
    model = recoup.optimize(blocks(), budget=BUDGET, cache=tmp_path, **COMPILED)
    with pytest.raises(recoup.BudgetError, match="1 TiB would have been enough for the smallest that was tried"):
        run(model, torch.randn(1024, 32), steps=1)
    assert len(tried) == 1
    assert len(asked) == compiled.MOST_PLANS


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("guess", [2**20, -(2**17)])
def test_a_refusal_is_not_made_of_a_guess(tmp_path, monkeypatch, guess):
    """What another compilation was off by is where the search for a plan begins, and nothing that the step needs."""

    def needs(folder) -> int:
        model = recoup.optimize(blocks(), budget="800KiB", cache=tmp_path / folder, **COMPILED)
        with pytest.raises(recoup.BudgetError) as refused:
            run(model, torch.randn(1024, 32), steps=1)
        return parse_bytes(re.search(r"needs at least ([\d.]+ \w+)", str(refused.value))[1])

    first, recall = needs("without"), Store.recall
    monkeypatch.setattr(
        Store, "recall", lambda self, key: [guess] if key.startswith("correction") else recall(self, key)
    )
    assert needs("with") == first


@pytest.mark.usefixtures("nothing_compiled")
def test_where_steps_were_measured_a_refusal_says_what_they_took(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_measured", lambda *args: (0, 2**21, 1.0))
    monkeypatch.setattr(compiled, "PLAIN", 0.0)
    model = recoup.optimize(blocks(), budget="1.7MiB", cache=tmp_path, **COMPILED)
    with pytest.raises(recoup.BudgetError, match=r"within 1.7 MiB: 2 MiB would have been enough for the smallest"):
        run(model, torch.randn(1024, 32), steps=1)


@pytest.mark.usefixtures("nothing_compiled")
def test_a_fraction_is_of_what_the_plain_step_was_found_to_take(tmp_path, monkeypatch):
    """Where it was tried: all of it is always enough. Bytes are bytes."""
    measure, found = compiled._measured, []

    def more(*args):
        resident, rise, seconds = measure(*args)
        found.append(int(1.2 * (resident + rise)))
        return resident, found[-1] - resident, seconds

    monkeypatch.setattr(compiled, "_measured", more)
    model, x = blocks(), torch.randn(1024, 32)
    plan = recoup.plan(model, x, 1.0, cache=tmp_path, **COMPILED)
    assert len(plan.schedule) == len(plan.graph.ops)
    assert plan.peak_bytes == plan.budget_bytes == found[-1]
    recoup.optimize(model, budget=1.0, cache=tmp_path, **COMPILED)
    run(model, x, steps=1)
    assert repeats(model) == 0
    assert recoup.plans(model)[0].peak_bytes == found[-1]
    assert len(found) == 2
    budget = int(0.8 * found[-1])
    model = recoup.optimize(blocks(), budget=budget, cache=tmp_path, **COMPILED)
    run(model, x, steps=1)
    assert repeats(model) > 0
    assert recoup.plans(model)[0].peak_bytes <= budget


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(("budget", "plain"), [("80 GiB", compiled.PLAIN), ("2 MiB", 0.0)])
def test_a_device_with_less_than_the_budget(tmp_path, monkeypatch, budget, plain):
    def run_out(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(compiled, "_measured", run_out)
    monkeypatch.setattr(compiled, "PLAIN", plain)
    model = recoup.optimize(blocks(), budget=budget, cache=tmp_path, **COMPILED)
    with pytest.raises(recoup.BudgetError, match=f"ran out of memory in trying out steps that would fit into {budget}"):
        run(model, torch.randn(1024, 32), steps=1)


@pytest.mark.usefixtures("nothing_compiled")
def test_the_best_is_tried_again_where_memory_ran_out(tmp_path, monkeypatch):
    """cuDNN may have taken to other algorithms then, in less memory."""
    torch.manual_seed(0)
    x = torch.randn(1024, 32)
    budget = int(0.8 * recoup.plan(blocks(4), x, 1.0, cache=tmp_path, **COMPILED).peak_bytes)
    shares, seen = iter([1.2, 0.9, None, 0.85]), []

    def play(*args):
        share = next(shares)
        seen.append(share)
        if share is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 0, int(share * budget), 1.0

    monkeypatch.setattr(compiled, "_measured", play)
    monkeypatch.setattr(compiled, "MOST_ATTEMPTS", compiled.ATTEMPTS)
    model = recoup.optimize(blocks(4), budget=budget, cache=tmp_path, **COMPILED)
    run(model, x, steps=1)
    assert seen == [1.2, 0.9, None, 0.85]
    assert recoup.plans(model)[0].peak_bytes == int(0.85 * budget)


@pytest.mark.usefixtures("nothing_compiled")
def test_what_a_trial_leaves_on_the_device_is_no_reason_to_plan_again(tmp_path, monkeypatch):
    """A library may take a workspace for good when it is first called: the measured peak is with it."""
    torch.manual_seed(0)
    x = torch.randn(1024, 32)
    budget = int(0.8 * recoup.plan(blocks(), x, 1.0, cache=tmp_path, **COMPILED).peak_bytes)
    measure, left = compiled._measured, []

    def leave(*args):
        left.append(torch.empty(2**14))
        resident, _, seconds = measure(*args)
        return resident, budget - resident, seconds  # no room is left

    monkeypatch.setattr(compiled, "_measured", leave)
    monkeypatch.setattr(session, "TRUSTED", 1)  # look at what is there whenever it may have changed
    model = recoup.optimize(blocks(), budget=budget, cache=tmp_path, **COMPILED)
    run(model, x, steps=3)
    assert len(left) == 1
    assert repeats(model) > 0
    more = torch.empty(2**12)
    run(model, x, steps=1)
    assert len(left) == 2  # for what came from elsewhere there was no room
    del more


@pytest.mark.usefixtures("nothing_compiled")
def test_what_happens_outside_counts_when_a_step_is_tried(tmp_path):
    """A loss makes copies of what the model returns; those of the input, to undo the trial, are beside the memory."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(256, 8), nn.Tanh(), nn.Linear(8, 256)), torch.randn(2048, 256)
    recoup.optimize(model, budget="1GiB", cache=tmp_path, **COMPILED)

    def step():
        model.zero_grad(set_to_none=True)
        y = model(x)
        y.square().mean().backward()

    step()
    model.zero_grad(set_to_none=True)
    measured = measure_peak(step, CPU)
    assert measured <= recoup.plans(model)[0].peak_bytes < 1.2 * measured


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_are_laid_out_as_in_the_forward(tmp_path, monkeypatch, channels_last):
    """Whatever Inductor would decide for those that the backward makes again. On a CPU it is always channels last."""
    decide, seen, measured = GraphLowering.decide_layout_opt, [], []

    def decided(module, *, is_inference):
        if not isinstance(module, fx.GraphModule):  # asked about the forward's nodes
            return channels_last
        seen.append(decide(module, is_inference=is_inference))
        return seen[-1]

    monkeypatch.setattr(GraphLowering, "decide_layout_opt", staticmethod(decided))
    before = inductor_config.layout_optimization, inductor_config.force_layout_optimization
    measure = measuring.measure
    monkeypatch.setattr(measuring, "measure", lambda *args: measured.append(args[2]) or measure(*args))
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(6)])
    x = torch.randn(64, 8, 12, 12)
    monkeypatch.setattr(compiled, "PLAIN", 0.0)  # never PyTorch's own split
    recoup.optimize(model, budget="1GiB", cache=tmp_path, **COMPILED)
    with inductor_config.patch(fx_graph_cache=False):
        run(model, x, steps=1)
    assert len(seen) >= 2
    assert set(seen) == set(measured) == {channels_last}
    assert (inductor_config.layout_optimization, inductor_config.force_layout_optimization) == before


def train(model, made) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of three steps, the last over two batches; what is left of gradients and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    losses = []
    again = tuple(tensor.flip(0) for tensor in made.inputs)
    for seed, batches in enumerate(([made.inputs], [made.inputs], [made.inputs, again])):
        torch.manual_seed(seed)
        optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            loss = made.loss(model(*batch))
            loss.backward()
            losses.append(loss.item())
            del loss
        optimizer.step()
    left = [parameter.grad for parameter in model.parameters()] + list(model.buffers())
    return losses, [tensor.clone() for tensor in left]


@pytest.mark.full
@pytest.mark.parametrize("share", [1.0, 0.8, 0.6])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_as_plain_compiled(tmp_path, name, share):
    """``share`` is of the way from what is resident to the plain compiled step's measured peak, or what is feasible."""
    torch.manual_seed(0)
    made = example(name, batch=BATCH)
    plain = copy.deepcopy(well_conditioned(made.model))
    plain.compile()
    theirs = train(plain, made)
    resident = resident_bytes(CPU)
    peak = measure_peak(lambda: made.loss(plain(*made.inputs)).backward(), CPU)
    parameters, inputs = (
        sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        for tensors in (made.model.parameters(), made.inputs)
    )
    around = 3 * parameters + inputs  # our own copy, its gradients and momentum; the other batch
    budget = first = int(resident + share * (peak - resident)) + around
    while True:
        torch.compiler.reset()
        model = copy.deepcopy(made.model)
        recoup.optimize(model, budget=budget, cache=tmp_path, **{**COMPILED, "time_limit": 3.0})
        try:
            ours = train(model, made)
            break
        except recoup.BudgetError:
            budget = int(1.15 * budget)
    assert share > 0.6 or repeats(model) > 0 or budget > first  # VGG: one convolution's backward is nearly all
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    for mine, yours in zip(ours[1], theirs[1], strict=True):
        assert (mine - yours).double().norm() <= 1e-4 * yours.double().norm() + NOTHING
    del ours, mine  # copies that were not there when the step was planned, and on CPU not every call looks for
    assert measure_peak(lambda: made.loss(model(*made.inputs)).backward(), CPU) <= budget


def test_a_compiled_plan_as_a_file(tmp_path):
    model, x = blocks(), torch.randn(1024, 32)
    plain = copy.deepcopy(model)
    plan = recoup.plan(model, x, BUDGET, cache=tmp_path, **COMPILED)
    plan.save(tmp_path / "blocks.plan.json")
    recoup.optimize(model, plan=tmp_path / "blocks.plan.json", cache=tmp_path, **COMPILED)
    assert run(model, x) == pytest.approx(run(torch.compile(plain), x), rel=1e-5)
    assert recoup.plans(model)[0].schedule.steps() == plan.schedule.steps()
    assert repeats(model) > 0
    assert recoup.plans(model)[0].peak_bytes <= plan.budget_bytes


def test_an_input_made_in_inference_mode(tmp_path):
    class Shifts(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = blocks(1)

        def forward(self, x, shift):
            return self.body(x) + shift

    with torch.inference_mode():
        shift = torch.randn(64, 32)
    model = recoup.optimize(Shifts(), budget="1GiB", cache=tmp_path, **COMPILED)
    model(torch.randn(64, 32), shift).sum().backward()
    assert len(recoup.plans(model)) == 1
