"""A compiled step is tried out before the first one, corrected by what was measured, and refused for what it needs."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import recoup
from recoup.torch import compiled, planning, session
from recoup.torch.compiled import _as_measured
from recoup.torch.corrections import Corrections
from recoup.torch.memory import measure_peak
from recoup.torch.store import Store
from recoup.units import parse_bytes
from tests.torch_helpers import COMPILED, blocks, repeats, run

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGET = 0.75
CPU = torch.device("cpu")


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
