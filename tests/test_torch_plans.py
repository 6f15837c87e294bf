"""Plans as files, and everything that is refused with a message that says what to do."""

import copy
import json

import pytest
import torch
from torch import nn

import recoup
import recoup.torch.measuring
import recoup.torch.planning
from tests.torch_helpers import QUICK, assert_same, repeats, state, tight

pytestmark = pytest.mark.usefixtures("one_thread")


def net(width=8):
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.2)),
        *(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)),
    )


def images(batch=8, side=16):
    return torch.randn(batch, 3, side, side)


def train(model, x, steps=2):
    for number in range(steps):
        torch.manual_seed(number)
        model.zero_grad(set_to_none=True)
        model(x).square().sum().backward()


def never(*_, **__):
    raise AssertionError("this was to be found in the cache")


@pytest.fixture
def saved(cache, tmp_path):
    """A model, its input, its plan at a tight budget, and the file with it."""
    torch.manual_seed(0)
    model, x = net(), images()
    fraction = tight(model, x, 0.4, cache, slack=0.05)
    reserve = 2 * sum(parameter.nbytes for parameter in model.parameters())
    plan = recoup.plan(model, x, fraction, cache=cache, reserve=reserve, **QUICK)
    path = tmp_path / "net.plan.json"
    plan.save(path)
    return model, x, plan, path


class TestFiles:
    def test_planning_runs_nothing(self, saved):
        model, _, plan, _ = saved
        assert int(model[1].num_batches_tracked) == 0
        assert all(parameter.grad is None for parameter in model.parameters())
        assert plan.profiled_on is not None
        assert f"torch {torch.__version__}" in plan.profiled_on
        assert plan.peak_bytes <= plan.budget_bytes
        assert len(plan.schedule) > len(plan.graph.ops)
        with pytest.raises(recoup.CaptureError, match="not optimized"):
            recoup.plans(model)

    def test_a_plan_comes_back_as_it_was(self, saved):
        *_, plan, path = saved
        again = recoup.Plan.load(path)
        assert again.to_json() == plan.to_json()
        assert again.schedule.steps() == plan.schedule.steps()

    @pytest.mark.parametrize("kind", ["object", "path", "text"])
    def test_a_plan_is_followed(self, saved, cache, kind):
        model, x, plan, path = saved
        plain = copy.deepcopy(model)
        given = {"object": plan, "path": path, "text": str(path)}[kind]
        recoup.optimize(model, plan=given, cache=cache, **QUICK)
        train(model, x)
        ours = state(model)
        train(plain, x)
        assert_same(ours, state(plain))
        assert recoup.plans(model)[0].schedule.steps() == plan.schedule.steps()
        assert repeats(model) == len(plan.schedule) - len(plan.graph.ops) > 0

    def test_no_search_and_no_store(self, saved, monkeypatch, cache):
        model, x, _, path = saved
        monkeypatch.setattr(recoup.torch.planning, "solve", never)
        recoup.optimize(model, plan=path, cache=cache, **QUICK)
        train(model, x)

    def test_a_plan_through_torch_compile(self, saved, cache):
        model, x, _, path = saved
        plain = copy.deepcopy(model)
        compiled = torch.compile(model, backend="recoup", options={"plan": str(path), "cache": cache, **QUICK})
        train(compiled, x)
        ours = state(model)
        train(plain, x)
        assert_same(ours, state(plain))

    def test_another_model(self, saved, cache):
        _, x, plan, path = saved
        other = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
        with torch.no_grad():
            other(x)
        recoup.optimize(other, plan=path, cache=cache, **QUICK)
        with pytest.raises(recoup.PlanError, match=rf"it has {len(plan.graph.ops)} ops, the step has \d+"):
            other(x)

    def test_a_wider_model(self, saved, cache):
        _, x, _, path = saved
        recoup.optimize(other := net(width=10), plan=path, cache=cache, **QUICK)
        with pytest.raises(recoup.PlanError, match=r"convolution makes shapes \[\[8, 8, 16, 16\]\], the step's"):
            other(x)

    def test_another_op(self, saved, cache):
        model, x, _, path = saved
        model[5] = nn.Sigmoid()
        recoup.optimize(model, plan=path, cache=cache, **QUICK)
        with pytest.raises(recoup.PlanError, match=r"it has .*(relu|ops).*, the step has"):
            model(x)

    def test_another_shape(self, saved, cache):
        model, _, _, path = saved
        recoup.optimize(model, plan=path, cache=cache, **QUICK)
        with pytest.raises(recoup.PlanError, match=r"makes shapes .*\[8, 8, 16, 16\].*, the step's .*\[6, 8, 16, 16\]"):
            model(images(batch=6))

    def test_another_torch(self, saved, cache):
        model, x, _, path = saved
        data = json.loads(path.read_text())
        data["profiled_on"] = data["profiled_on"].replace(f"torch {torch.__version__}", "torch 2.0.1")
        path.write_text(json.dumps(data))
        recoup.optimize(model, plan=path, cache=cache, **QUICK)
        with pytest.raises(recoup.PlanError, match=r"torch 2\.0\.1.*this is .*torch " + torch.__version__[:4]):
            model(x)

    def test_the_other_mode(self, saved, cache):
        model, x, _, path = saved
        data = json.loads(path.read_text())
        data["profiled_on"] = data["profiled_on"].replace("eager", "inductor")
        path.write_text(json.dumps(data))
        recoup.optimize(model, plan=path, cache=cache, **QUICK)
        with pytest.raises(recoup.PlanError, match=r"inductor; this is .*eager"):
            model(x)

    @pytest.mark.parametrize("change", ["unknown op", "op left out", "repeat added", "not json", "not a plan"])
    def test_a_changed_file(self, saved, change):
        model, _, _, path = saved
        data = json.loads(path.read_text())
        if change == "unknown op":
            data["schedule"][3] = "nothing"
        elif change == "op left out":
            del data["schedule"][0]
        elif change == "repeat added":
            data["schedule"].insert(1, data["schedule"][0])
        elif change == "not a plan":
            data["format"] = "something"
        path.write_text("{" if change == "not json" else json.dumps(data))
        expected = {
            "unknown op": "nothing",
            "op left out": "the plan is broken",
            "repeat added": "the plan promises",
            "not json": "JSON",
            "not a plan": "not a recoup-plan file",
        }
        with pytest.raises(recoup.PlanError, match=expected[change]):
            recoup.optimize(model, plan=path)

    def test_a_missing_file(self, tmp_path):
        with pytest.raises(recoup.PlanError, match=r"gone\.json"):
            recoup.optimize(net(), plan=tmp_path / "gone.json")

    def test_more_resident_than_planned_for(self, saved, cache):
        model, x, _, _ = saved
        plan = recoup.plan(model, x, tight(model, x, 0.1, cache, slack=0.03), cache=cache, **QUICK)
        recoup.optimize(model, plan=plan, cache=cache, **QUICK)
        more = torch.ones(1_000_000)
        with pytest.raises(recoup.BudgetError, match="make a plan with reserve="):
            model(x)
        assert more.sum() == 1_000_000

    def test_a_budget_below_the_plans_peak(self, saved, cache):
        model, x, plan, _ = saved
        recoup.optimize(model, budget=1000, plan=plan, cache=cache, **QUICK)
        with pytest.raises(recoup.BudgetError, match=r"the plan's peak is .*, over the budget of 1000 B"):
            model(x)

    def test_keyword_inputs(self, cache):
        def function(x, *, scale):
            return (x * scale).tanh().sin().sum()

        x = torch.randn(64, 64, requires_grad=True)
        plan = recoup.plan(function, {"x": x, "scale": 2.0}, 1.0, cache=cache, **QUICK)
        assert next(op.name for op in plan.graph.ops if op.phase == "forward").startswith("aten.mul")

    def test_nothing_to_plan(self, cache):
        with pytest.raises(recoup.CaptureError, match="nothing in this step needs a gradient"):
            recoup.plan(net().requires_grad_(False), images(), 1.0, cache=cache, **QUICK)

    @pytest.mark.parametrize("planner", ["auto", "checkpoint-all"])
    def test_a_program_in_parts_has_no_single_plan(self, cache, planner):
        def function(x):
            y = x.sin().cos()
            print()
            return y.tanh().sum()

        with (
            pytest.warns(UserWarning, match=r"test_torch_plans\.py"),
            pytest.raises(recoup.CaptureError, match=r"a plan holds one graph.*test_torch_plans\.py"),
        ):
            recoup.plan(function, torch.randn(4096, requires_grad=True), 1.0, cache=cache, planner=planner, **QUICK)


class TestBadInput:
    @pytest.mark.parametrize(
        ("budget", "text"),
        [
            ("lots", "'lots' is not a budget: write bytes with a unit, as in 6GiB"),
            ("6 parsecs", "there is no unit 'parsecs'"),
            (2.0, "a budget without a unit is a fraction between 0 and 1"),
            (0.0, "a fraction between 0 and 1"),
            (-5, "a budget of -5 bytes means nothing"),
            (None, "a budget is needed: bytes with a unit .6GiB., a fraction of the plain peak .0.4., or auto"),
            (True, "True is not a budget"),
            (float("nan"), "nan is not a budget"),
            ([1], "is not a budget"),
        ],
    )
    def test_budgets_that_mean_nothing(self, budget, text):
        with pytest.raises(recoup.BudgetError, match=text):
            recoup.optimize(nn.Linear(3, 3), budget=budget)
        with pytest.raises(recoup.BudgetError, match=text):
            recoup.plan(nn.Linear(3, 3), torch.randn(2, 3), budget)

    def test_auto_needs_a_device_to_ask(self, cache):
        model = recoup.optimize(nn.Linear(3, 3), budget="auto", cache=cache, **QUICK)
        with pytest.raises(recoup.BudgetError, match="budget='auto' asks the device what is free; on cpu give bytes"):
            model(torch.randn(2, 3))

    def test_settings_that_mean_nothing(self):
        model = nn.Linear(3, 3)
        with pytest.raises(recoup.SettingError, match="compile='xla': there are 'inductor' and 'eager'"):
            recoup.optimize(model, budget=1.0, compile="xla")
        with pytest.raises(recoup.MethodError, match="no method 'nope'; choose one of optimal, checkmate"):
            recoup.optimize(model, budget=1.0, planner="nope")
        with pytest.raises(recoup.SettingError, match="time limit of -1"):
            recoup.optimize(model, budget=1.0, time_limit=-1)
        with pytest.raises(recoup.SettingError, match="gap of 2"):
            recoup.optimize(model, budget=1.0, gap=2)
        with pytest.raises(recoup.SettingError, match="reserve=-1: give bytes"):
            recoup.optimize(model, budget=1.0, reserve=-1)
        with pytest.raises(recoup.BudgetError, match="'much' is not a budget: give bytes"):
            recoup.optimize(model, budget=1.0, reserve="much")

    @pytest.mark.parametrize(
        ("setting", "text"),
        [
            ({"reserve": 0.5}, "reserve=0.5: give bytes"),
            ({"reserve": None}, "reserve=None: give bytes"),
            ({"reserve": True}, "reserve=True: give bytes"),
            ({"cache": None}, "cache=None: give a folder"),
            ({"time_limit": "3"}, "time_limit='3' is not a number"),
            ({"gap": "x"}, "gap='x' is not a number"),
            ({"plan": {}}, "plan={} is neither a plan"),
            ({"plan": 3}, "plan=3 is neither a plan"),
        ],
    )
    def test_settings_of_another_type(self, setting, text):
        with pytest.raises(recoup.RecoupError, match=text):
            recoup.optimize(nn.Linear(3, 3), budget=1.0, **setting)

    def test_a_plan_to_make_a_plan_of(self):
        with pytest.raises(recoup.SettingError, match=r"plan= is for recoup\.optimize"):
            recoup.plan(nn.Linear(3, 3), torch.randn(2, 3), 1.0, plan="x")

    @pytest.mark.parametrize("budget", [0, "0B"])
    def test_no_bytes_at_all(self, cache, budget):
        model = recoup.optimize(net(), budget=budget, cache=cache, **QUICK)
        with pytest.raises(recoup.BudgetError, match="a budget of 0 B is not enough for this step"):
            model(images())

    def test_a_planner_that_finds_nothing_is_not_replaced_by_another(self, cache):
        """A budget that others meet: ``checkpoint-all`` recomputes nothing."""
        torch.manual_seed(0)
        model, x = net(), images()
        fraction = tight(model, x, 0.4, cache, slack=0.05)
        assert recoup.plan(model, x, fraction, cache=cache, **QUICK).method == "optimal"
        with pytest.raises(recoup.BudgetError, match="checkpoint-all finds nothing that fits; planner='auto' does"):
            recoup.plan(model, x, fraction, cache=cache, planner="checkpoint-all", **QUICK)

    def test_neither_a_module_nor_a_function(self):
        with pytest.raises(recoup.CaptureError, match="str is neither a module nor a function"):
            recoup.optimize("resnet", budget=1.0)

    def test_planning_neither_a_module_nor_a_function(self):
        with pytest.raises(recoup.CaptureError, match="int is neither a module nor a function"):
            recoup.plan(3, torch.randn(2), 1.0)

    def test_a_model_that_fails_fails_as_before(self, cache):
        model = recoup.optimize(nn.Linear(3, 3), budget=1.0, cache=cache, **QUICK)
        with pytest.raises(RuntimeError, match=r"shape|dim"):
            model(torch.randn(2, 4))


def test_a_plan_for_a_device_that_is_not_here(cache, monkeypatch):
    """Nothing is measured, the estimate is the arithmetic at the stated rates, and the plan is refused for running."""
    monkeypatch.setattr(recoup.torch.measuring, "measure", None)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())))
    x = torch.randn(4096, 512)
    plain = recoup.plan(model, x, 1.0, estimate=True, cache=cache)
    costs = {op.id: op.time for op in plain.graph.ops}
    assert costs["addmm"] == pytest.approx(2 * 4096 * 512 * 512 / 5e13)
    assert costs["gelu"] == pytest.approx(2 * 4 * 4096 * 512 / 4.3e12)
    plan = recoup.plan(model, x, 0.8, estimate=True, cache=cache)
    assert plan.peak_bytes <= 0.8 * plain.peak_bytes
    assert len(plan.schedule) > len(plan.graph.ops)
    monkeypatch.undo()
    recoup.optimize(model, plan=plan, cache=cache, compile="eager")
    with pytest.raises(recoup.PlanError, match="estimated"):
        model(x)


def test_a_compiled_step_cannot_be_estimated():
    with pytest.raises(recoup.SettingError, match="needs its device"):
        recoup.plan(nn.Linear(2, 2), torch.ones(1, 2), 0.5, estimate=True, compile="inductor")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_estimate_takes_dropout_for_the_one_operator_that_it_is_on_a_gpu(cache, dtype):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.09), nn.Tanh()).to(dtype)
    plan = recoup.plan(model, torch.randn(4, 8, dtype=dtype), 1.0, estimate=True, cache=cache)
    assert "aten.native_dropout.default" in [op.name for op in plan.graph.ops]
