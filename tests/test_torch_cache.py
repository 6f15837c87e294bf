"""What was measured and planned before is found again, in the next process, too, and only where it still holds."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.convert_frame import compile_lock

import recoup
import recoup.torch.algorithms
import recoup.torch.compiled
import recoup.torch.measuring
import recoup.torch.planning
from recoup.generators import chain
from recoup.planners.floor import memory_floor
from recoup.torch.known import known_by
from recoup.torch.memory import MIB
from recoup.torch.models import UNet
from recoup.torch.planning import rounded
from recoup.torch.store import library_versions
from tests.test_torch_plans import images, net, never, train
from tests.torch_helpers import QUICK, tight

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_second_run_measures_and_solves_nothing(tmp_path, monkeypatch):
    def run():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = net(), images()
        recoup.optimize(model, budget=0.8, cache=tmp_path, **QUICK)
        train(model, x, steps=1)
        gradients = [parameter.grad.numpy().tobytes() for parameter in model.parameters()]
        return gradients, recoup.plans(model)[0].schedule.steps()

    first = run()
    monkeypatch.setattr(recoup.torch.planning, "solve", never)
    monkeypatch.setattr(recoup.torch.measuring, "measure", never)
    assert run() == first


def test_algorithms_that_are_others_in_each_process(tmp_path, monkeypatch):
    """As cuDNN's, where it may try them: the workspace is that of now, the seconds are those of before."""
    measure, measured = recoup.torch.measuring.measure, []

    def run(workspace: int):
        def measure_with(node, *rest):
            measured.append(node.name)
            return replace(measure(node, *rest), workspace=workspace)

        monkeypatch.setattr(recoup.torch.measuring, "measure", measure_with)
        torch._dynamo.reset()
        measured.clear()
        model = net()
        recoup.optimize(model, budget="1GiB", cache=tmp_path, **QUICK)
        train(model, images(), steps=1)
        graph = recoup.plans(model)[0].graph
        assert {op.workspace for op in graph.ops if "convolution" in op.id} == {workspace}
        return [op.time for op in graph.ops], len(measured)

    monkeypatch.setattr(recoup.torch.algorithms, "_has_algorithms", lambda key, _: "convolution" in key)
    monkeypatch.setattr(recoup.torch.algorithms, "_tried", {})
    times, everything = run(0)
    recoup.torch.algorithms._tried.clear()  # another process
    again, convolutions = run(16)
    assert again == times
    assert 0 < convolutions < everything
    assert run(16) == (times, 0)  # in this one they were tried


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_algorithms_that_are_others_in_each_thread(tmp_path, monkeypatch, mode):
    """Tried where the step will run them, and not while it is traced: a backward has no thread of its own then,
    and waiting for that thread could be forever."""
    measure, measured = recoup.torch.measuring.measure, {}

    def measure_here(node, *rest):
        count = measured[node.name] = measured.get(node.name, 0) + 1
        if node.name.startswith("convolution"):
            assert torch._C._is_multithreading_enabled()
            assert not compile_lock._is_owned()
        return replace(measure(node, *rest), workspace=100 * count)

    monkeypatch.setattr(recoup.torch.measuring, "measure", measure_here)
    monkeypatch.setattr(recoup.torch.algorithms, "_has_algorithms", lambda key, _: "convolution" in key)
    monkeypatch.setattr(recoup.torch.algorithms, "_tried", {})
    monkeypatch.setattr(recoup.torch.compiled, "PLAIN", 0.0)  # never PyTorch's own split
    model = net()
    recoup.optimize(model, budget="1GiB", cache=tmp_path, **(QUICK | {"compile": mode}))
    train(model, images(), steps=1)
    backward = {name for name in measured if name.startswith("convolution_backward")}
    forward = {name for name in measured if name in ("convolution", "convolution_1")}
    assert backward
    assert {measured[name] for name in backward} == {1}
    assert {measured[name] for name in forward} == {2}
    workspaces = {op.id: op.workspace for op in recoup.plans(model)[0].graph.ops}
    assert {workspaces[name] for name in forward} == {200}


@pytest.fixture
def choosing(monkeypatch):
    """cuDNN played: convolutions have algorithms, and work in so much memory, or as told in how much they are to.

    Returns what they were asked to work in, one for each time; None for anything.
    """
    measure, asked = recoup.torch.measuring.measure, []

    def begin(workspace, less=lambda room: 0, seconds=lambda room: 1.0):
        def measure_here(node, device, channels_last, room=None):
            cost = replace(measure(node, device, channels_last), workspace=0)
            if not node.name.startswith("convolution"):
                return cost
            asked.append(room)
            return replace(cost, seconds=seconds(room), workspace=workspace if room is None else less(room))

        monkeypatch.setattr(recoup.torch.measuring, "measure", measure_here)
        monkeypatch.setattr(recoup.torch.algorithms, "_has_algorithms", lambda key, _: "convolution" in key)
        monkeypatch.setattr(recoup.torch.algorithms, "_tried", {})
        monkeypatch.setattr(recoup.torch.algorithms, "_rooms", {})
        asked.clear()
        return asked

    return begin


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(("mode", "budget"), [("eager", 0.8), ("eager", "1MiB"), ("inductor", "1MiB")])
def test_algorithms_that_break_the_budget_are_chosen_again(tmp_path, choosing, mode, budget):
    """As cuDNN does where a workspace cannot be had; seconds are those of the algorithm then."""
    asked = choosing(2 * MIB, seconds=lambda room: 1.0 if room is None else 2.0)
    model, options = net(), QUICK | {"compile": mode, "cache": tmp_path}
    plan = recoup.plan(model, images(), budget, **options)
    ours = [op for op in plan.graph.ops if op.id.startswith("convolution")]
    assert {(op.workspace, op.time) for op in ours} == {(0, 2.0)}
    assert None in asked
    assert 0 < min(room for room in asked if room is not None) < 2 * MIB
    asked.clear()
    recoup.plan(model, images(), budget, **options)
    assert asked == []


def test_algorithms_are_chosen_again_where_each_fits_and_no_plan_does(tmp_path, choosing):
    asked = choosing(2**16)
    model, x = UNet(width=4, depth=3), torch.randn(2, 3, 32, 32)
    graph = recoup.plan(model, x, 1.0, cache=tmp_path, **QUICK).graph
    floor, least = memory_floor(graph).bytes, recoup.solve(graph, None, "min-memory").peak_bytes
    budget = (floor + least) // 2
    assert set(asked) == {None}
    assert floor < budget < least
    assert recoup.plan(model, x, budget, cache=tmp_path, **QUICK).peak_bytes <= budget
    assert 0 < min(room for room in asked if room is not None) < 2**16


def test_algorithms_that_there_are_not_in_less(tmp_path, choosing):
    """They are asked for once; then the budget is refused."""
    asked = choosing(2 * MIB, less=lambda room: 2 * MIB)
    for _ in range(2):
        with pytest.raises(recoup.BudgetError, match="needs 2"):
            recoup.plan(nn.Conv2d(3, 8, 3), images(), "1MiB", cache=tmp_path, **QUICK)
    assert len([room for room in asked if room is not None]) == 3  # the forward's on two threads, the backward's on one


def test_algorithms_in_ever_less(tmp_path, choosing):
    """What worked in so much may work in a little less."""
    choosing(2 * MIB, less=lambda room: room // 2**14 * 2**14)
    model = net()
    budgets = [MIB, MIB - 2**15, MIB - 2**16]
    plans = [recoup.plan(model, images(), budget, cache=tmp_path, **QUICK) for budget in budgets]
    assert all(plan.peak_bytes <= budget for plan, budget in zip(plans, budgets, strict=True))
    workspaces = [max(op.workspace for op in plan.graph.ops) for plan in plans]
    assert workspaces[0] > workspaces[1] > workspaces[2] > MIB // 2


def test_a_fraction_stays_what_it_was_when_algorithms_were_chosen_again(tmp_path, choosing):
    choosing(2 * MIB)
    plain = recoup.plan(nn.Conv2d(3, 8, 3), images(), 1.0, cache=tmp_path, **QUICK).peak_bytes
    plan = recoup.plan(nn.Conv2d(3, 8, 3), images(), 0.9, cache=tmp_path, **QUICK)
    assert plan.budget_bytes == pytest.approx(0.9 * plain, abs=1)
    assert plan.peak_bytes < plain - MIB


def test_a_plan_from_a_file_has_algorithms_chosen_again_too(tmp_path, choosing):
    choosing(2 * MIB)
    model, x = net(), images()
    plan = recoup.plan(model, x, "1MiB", cache=tmp_path, **QUICK)
    asked = choosing(2 * MIB)  # another process
    recoup.optimize(model, plan=plan, cache=tmp_path, compile="eager")
    train(model, x, steps=1)
    assert {room is None for room in asked} == {True, False}
    choosing(2 * MIB, less=lambda room: 2 * MIB)
    torch._dynamo.reset()
    with pytest.raises(recoup.BudgetError, match="work in more memory"):
        train(recoup.optimize(net(), plan=plan, cache=tmp_path, compile="eager"), x, steps=1)


def test_an_estimate_asks_for_no_algorithms(tmp_path, choosing):
    asked = choosing(2 * MIB)
    recoup.plan(net(), images(), 1.0, cache=tmp_path, **QUICK)
    with pytest.raises(recoup.BudgetError):
        recoup.plan(net(), images(), "8KiB", cache=tmp_path, estimate=True, **QUICK)
    assert set(asked) == {None}


def test_a_plan_is_known_whatever_the_workspaces_are():
    graph = chain(3)

    def with_(**changes):
        ops = [replace(op, implementations=(replace(op.implementations[0], **changes),)) for op in graph.ops]
        return known_by(replace(graph, ops=tuple(ops)))

    assert with_(workspace=64) == with_(workspace=0) != with_(time=2)


def test_a_few_bytes_more_around_a_step_are_no_new_plan():
    """Resident memory is counted in thousandths of the budget."""
    assert [rounded(size, 2**20) for size in (0, 1, 1024, 1025)] == [0, 1024, 1024, 2048]


@pytest.mark.parametrize(("before", "solved"), [(64, False), (2**16, True)], ids=["a little", "much"])
def test_a_plan_is_made_anew_where_smaller_workspaces_leave_much_of_the_budget(
    tmp_path, choosing, monkeypatch, before, solved
):
    """A plan that still takes about what it took is kept, whatever the workspaces are that it does not depend on."""
    solve, calls = recoup.torch.planning.solve, []
    x = images()
    choosing(before)
    budget = int(0.8 * recoup.plan(net(), x, 1.0, cache=tmp_path, **QUICK).peak_bytes)
    first = recoup.plan(net(), x, budget, cache=tmp_path, **QUICK)
    assert len(first.schedule) > len(first.graph.ops)
    choosing(0)  # another process
    monkeypatch.setattr(recoup.torch.planning, "solve", lambda *args, **how: calls.append(args) or solve(*args, **how))
    again = recoup.plan(net(), x, budget, cache=tmp_path, **QUICK)
    assert bool(calls) == solved
    assert again.cost < first.cost if solved else again.schedule.steps() == first.schedule.steps()


def test_what_was_measured_before_a_library_was_given_up_is_measured_again(tmp_path, monkeypatch):
    """As PyTorch gives up oneDNN at the first product in bfloat16 on a CPU that has none."""
    honest = recoup.torch.measuring.measure
    measured = []

    def failing(node, *rest):
        measured.append((node.name, torch.backends.mkldnn.enabled))
        if len(measured) == 3:
            torch._C._set_mkldnn_enabled(False)
        return honest(node, *rest)

    monkeypatch.setattr(recoup.torch.measuring, "measure", failing)
    model, x = net(), images()
    recoup.plan(model, x, 1.0, cache=tmp_path, **QUICK)
    before, after = ([name for name, enabled in measured if enabled == wanted] for wanted in (True, False))
    assert len(before) == 3
    assert set(before) <= set(after)
    monkeypatch.setattr(recoup.torch.measuring, "measure", never)
    recoup.plan(model, x, 1.0, cache=tmp_path, **QUICK)


@pytest.mark.parametrize("with_algorithms", [False, True])
def test_what_was_measured_before_the_user_stopped_it_is_kept(tmp_path, monkeypatch, with_algorithms):
    monkeypatch.setattr(recoup.torch.algorithms, "_has_algorithms", lambda key, _: with_algorithms)
    monkeypatch.setattr(recoup.torch.algorithms, "_tried", {})
    honest, measured = recoup.torch.measuring.measure, []

    def stopped(node, *rest):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(node.name)
        return honest(node, *rest)

    monkeypatch.setattr(recoup.torch.measuring, "measure", stopped)
    model, x = net(), images()
    with pytest.raises(KeyboardInterrupt):
        recoup.plan(model, x, 1.0, cache=tmp_path, **QUICK)
    assert len(list(tmp_path.glob("costs-*.json"))) == 1
    after = []
    monkeypatch.setattr(
        recoup.torch.measuring, "measure", lambda node, *rest: after.append(node.name) or honest(node, *rest)
    )
    recoup.plan(model, x, 1.0, cache=tmp_path, **QUICK)
    assert len(after) > 3
    assert with_algorithms or set(after).isdisjoint(measured)  # the last of them was to run on another thread, too


def test_a_broken_cache_is_no_problem(tmp_path):
    model, x = net(), images()
    fraction = tight(model, x, 0.5, tmp_path, 0.02)
    recoup.optimize(model, budget=fraction, cache=tmp_path, **QUICK)
    train(model, x, steps=1)
    files = list(tmp_path.iterdir())
    assert len(files) >= 2
    for text in ("{broken", "[]", '{"costs": [], "rates": 3}', '{"costs": {"a": 1}, "kept": [[]]}'):
        for file in files:
            file.write_text(text)
        torch._dynamo.reset()
        recoup.optimize(model, budget=fraction, cache=tmp_path, **QUICK)
        train(model, x, steps=1)


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    model, x = net(), images()
    recoup.optimize(model, budget=1.0, cache=tmp_path / "file" / "folder", **QUICK)
    train(model, x, steps=1)
    assert len(recoup.plans(model)) == 1


def test_no_cache_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    recoup.optimize(model, budget=1.0, cache=False, **QUICK)
    model(x).sum().backward()
    assert list(tmp_path.iterdir()) == []
    recoup.optimize(model, budget=1.0, cache=True, **QUICK)
    model(x).sum().backward()
    assert [path.name for path in tmp_path.iterdir()] == ["recoup"]


def test_measurements_with_other_precisions_are_others():
    """After these have been set, PyTorch refuses to read the settings that they replace."""
    before, convolutions = library_versions(), torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        assert library_versions() != before
    finally:
        torch.backends.cudnn.conv.fp32_precision = convolutions
    assert library_versions() == before
