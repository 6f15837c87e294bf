"""``recoup.optimize`` is a drop-in: the object stays what it was, and everything one does with a model still works."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import recoup
from tests.torch_helpers import QUICK, Wrapped, assert_same, check, images, net, repeats, state, tight

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::recoup.RecoupWarning"),
]


class TestDropIn:
    def test_the_object_stays_what_it_was(self, cache):
        model = net(norm=True)
        keys, parameters, kind = list(model.state_dict()), list(model.parameters()), type(model)
        buffers, names = list(model.buffers()), [name for name, _ in model.named_modules()]
        result = recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
        model(images()).sum().backward()
        assert result is model
        assert type(result) is kind
        assert list(result.state_dict()) == keys
        assert not any("_orig_mod" in key for key in result.state_dict())
        assert all(a is b for a, b in zip(result.parameters(), parameters, strict=True))
        assert all(a is b for a, b in zip(result.buffers(), buffers, strict=True))
        assert [name for name, _ in model.named_modules()] == names
        assert len(recoup.plans(model)) == 1

    def test_forward_hooks_and_pre_hooks_run(self, cache):
        model = net()
        called = []
        model.register_forward_hook(lambda module, args, output: called.append("hook") or output * 2)
        model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model[3].register_forward_hook(lambda module, args, output: output + 1)
        plain = copy.deepcopy(model)
        x = images()
        recoup.optimize(model, budget=tight(model, x, 0.3, cache, 0.02), cache=cache, **QUICK)
        called.clear()
        for each in (plain, model):
            each(x).square().sum().backward()
        assert_same(state(model), state(plain))
        assert called == ["hook", "hook"]

    def test_full_backward_hooks_run(self, cache):
        model = Wrapped(net())
        plain = copy.deepcopy(model)
        seen = []
        for each in (plain, model):
            each.register_full_backward_hook(lambda module, given, got: seen.append(got[0].clone()))
        recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
        x = images()
        for each in (plain, model):
            each(x).square().sum().backward()
        assert_same(state(model), state(plain))
        assert len(seen) == 2
        assert_same(seen[1], seen[0])

    def test_a_hook_registered_later_runs(self, cache):
        model = net()
        x = images()
        recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
        first = model(x).detach().clone()
        model.register_forward_hook(lambda module, args, output: output * 2)
        assert_same(model(x).detach(), first * 2)

    def test_train_and_eval(self, cache):
        model = net(dropout=0.5, norm=True)
        plain = copy.deepcopy(model)
        x = images()
        recoup.optimize(model, budget=tight(model, x, 0.3, cache, 0.02), cache=cache, **QUICK)
        for training in (True, False, True):
            for each in (plain, model):
                each.train(training)
                each.zero_grad(set_to_none=True)
                torch.manual_seed(5)
                each(x).square().sum().backward()
            assert model.training is training
            assert_same(state(model), state(plain), f"training {training}")

    def test_without_gradients_it_runs_plain(self, cache):
        model = net(norm=True)
        plain = copy.deepcopy(model)
        recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
        x = images()
        with torch.no_grad():
            assert_same(model(x), plain(x))
        with torch.inference_mode():
            assert_same(model(x).clone(), plain(x).clone())
        assert recoup.plans(model) == []
        assert_same(state(model), state(plain))

    def test_a_step_in_which_nothing_wants_a_gradient(self, cache):
        model = net().requires_grad_(False)
        plain = copy.deepcopy(model)
        recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
        x = images()
        assert_same(model(x), plain(x))
        assert not model(x).requires_grad
        assert recoup.plans(model) == []

    @pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
    def test_copies_are_plain(self, cache, how):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
        x = torch.randn(2, 4)
        model(x).sum().backward()
        if how == "deepcopy":
            twin = copy.deepcopy(model)
        elif how == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        assert type(twin) is nn.Sequential
        assert list(twin.state_dict()) == list(model.state_dict())
        with pytest.raises(recoup.CaptureError, match="not optimized"):
            recoup.plans(twin)
        twin.zero_grad()
        model.zero_grad()
        for each in (twin, model):
            each(x).sum().backward()
        assert_same(state(twin), state(model))

    def test_loading_a_state_dict_and_moving_dtype(self, cache):
        model = net()
        x = images()
        recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
        model(x).sum().backward()
        other = net()
        model.load_state_dict(other.state_dict())
        model.zero_grad()
        for each in (model, other):
            each(x).square().sum().backward()
        assert_same(state(model), state(other))
        model.double().zero_grad()
        other.double().zero_grad()
        for each in (model, other):
            each(x.double()).square().sum().backward()
        assert_same(state(model), state(other))
        assert model[0].weight.grad.dtype == torch.float64

    def test_optimized_twice_the_second_counts(self, cache):
        model = net()
        plain = copy.deepcopy(model)
        x = images()
        fraction = tight(model, x, 0.3, cache, 0.02)
        recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
        model(x).sum().backward()
        loose = recoup.plans(model)[0].budget_bytes
        model.zero_grad(set_to_none=True)
        recoup.optimize(model, budget=fraction, cache=cache, **QUICK)
        model(x).sum().backward()
        plain(x).sum().backward()
        assert repeats(model) > 0
        assert recoup.plans(model)[0].budget_bytes < loose
        assert_same(state(model), state(plain))

    def test_an_error_of_the_users_own_is_no_reason_to_stop(self, cache):
        class Fails(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = net()

            def forward(self, x, bad=False):
                if bad:
                    raise KeyError("bad batch")
                return self.body(x)

        model = recoup.optimize(Fails(), budget=0.9, cache=cache, **QUICK)
        for _ in range(2):
            model(images()).sum().backward()
            assert len(recoup.plans(model)) == 1
            assert len(recoup.plans(model)[0].graph.ops) > 5
            with pytest.raises(KeyError, match="bad batch"):
                model(images(), bad=True)

    def test_more_variants_than_dynamo_allows_for(self, cache):
        model = nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(8, 8), nn.Tanh())))
        model.requires_grad_(False)
        plain = copy.deepcopy(model)
        x = torch.randn(64, 8)
        recoup.optimize(model, budget="1MiB", cache=cache, **QUICK)
        for index in reversed(range(10)):
            for each in (model, plain):
                each[2 * index].requires_grad_(True)
                each.zero_grad(set_to_none=True)
                each(x).sum().backward()
        assert_same(state(model), state(plain))

    def test_a_function_optimized_twice(self, cache):
        model = net()
        twice = recoup.optimize(recoup.optimize(lambda x: model(x).sum(), budget=1.0, cache=cache, **QUICK), budget=1.0)
        twice(images()).backward()
        assert len(recoup.plans(twice)) == 1

    def test_calls_with_nothing_to_plan_leave_the_plan_as_it_is(self, cache):
        model = net()

        def loss(x, kind):
            if kind == "none":
                return None
            if kind == "wrong":
                raise ValueError("an empty batch")
            return model(x).square().mean()

        planned, x = recoup.optimize(loss, budget=1.0, cache=cache, **QUICK), images()
        planned(x, "right").backward()
        plan = recoup.plans(planned)
        model.zero_grad(set_to_none=True)
        for kind in ("none", "right", "wrong", "right", "none", "none", "right"):
            if kind == "wrong":
                with pytest.raises(ValueError, match="an empty batch"):
                    planned(x, kind)
            elif kind == "none":
                assert planned(x, kind) is None
            else:
                planned(x, kind).backward()
                model.zero_grad(set_to_none=True)
            assert [id(one) for one in recoup.plans(planned)] == [id(one) for one in plan]

    def test_under_a_dispatch_mode(self, cache):
        model = recoup.optimize(net(), budget=1.0, cache=cache, **QUICK)
        model(images()).sum().backward()
        with FlopCounterMode(display=False), pytest.raises(recoup.CaptureError, match="FlopCounterMode is on"):
            model(images())
        model(images()).sum().backward()

    def test_inside_a_transform(self, cache):
        function = recoup.optimize(lambda x: x.sin().sum(), budget=1.0, cache=cache, **QUICK)
        with pytest.raises(recoup.CaptureError, match=r"inside a torch\.func transform .* optimize what applies it"):
            torch.func.grad(function)(torch.randn(4))

    def test_around_a_transform(self, cache):
        weight = torch.randn(4, 4, requires_grad=True)

        def steepness(x):
            return torch.func.grad(lambda at: (at @ weight).sin().sum())(x).square().sum()

        x = torch.randn(3, 4)
        steepness(x).backward()
        expected, weight.grad = weight.grad, None
        recoup.optimize(steepness, budget=1.0, cache=cache, **QUICK)(x).backward()
        assert_same(weight.grad, expected)

    def test_two_models_take_turns(self, cache):
        models = [net(width=6, dropout=0.2), net(width=10, norm=True)]
        plains = copy.deepcopy(models)
        x = images()
        for model in models:
            recoup.optimize(model, budget=tight(model, x, 0.5, cache, 0.05), cache=cache, **QUICK)
        for step in range(2):
            for index in (0, 1):
                for each in (plains[index], models[index]):
                    torch.manual_seed(step)
                    each(x).square().sum().backward()
                assert_same(state(models[index]), state(plains[index]), f"model {index} step {step}")

    def test_more_models_than_dynamo_allows_recompilations(self, cache):
        for width in range(1, 12):
            model = nn.Linear(4, width)
            recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
            model(torch.randn(2, 4)).sum().backward()
            assert model.weight.grad.shape == (width, 4)


class TestTopLevel:
    def test_sequential(self, cache):
        check(net(), (images(),), cache)

    def test_linear(self, cache):
        check(nn.Linear(8, 4), (torch.randn(16, 8),), cache, budget=1.0, recomputes=False)

    def test_a_loss_function(self, cache):
        model = net(dropout=0.3)
        plain = copy.deepcopy(model)
        x, y = images(), torch.randint(4, (4,))
        fraction = tight(lambda x, y: functional.cross_entropy(model(x), y), (x, y), 0.3, cache, 0.02)

        @recoup.optimize(budget=fraction, cache=cache, **QUICK)
        def loss(x, y):
            """What it is."""
            return functional.cross_entropy(model(x), y)

        assert loss.__name__ == "loss"
        assert loss.__doc__ == "What it is."
        for step in range(3):
            torch.manual_seed(step)
            ours = loss(x, y)
            ours.backward()
            rng = torch.get_rng_state()
            torch.manual_seed(step)
            theirs = functional.cross_entropy(plain(x), y)
            theirs.backward()
            assert_same(ours, theirs)
            assert_same(rng, torch.get_rng_state())
            assert_same(state(model), state(plain))
        assert repeats(loss) > 0

    def test_torch_compile_backend(self, cache):
        model = net(norm=True)
        plain = copy.deepcopy(model)
        x = images()
        fraction = tight(model, x, 0.3, cache, 0.02)
        compiled = torch.compile(model, backend="recoup", options={"budget": fraction, "cache": cache, **QUICK})
        for _ in range(2):
            for each in (plain, compiled):
                each(x).square().sum().backward()
            assert_same(state(model), state(plain))

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"budget": 0.5, "buget": 1}, "there is no option 'buget': there are cache, compile"),
            ({"budget": 0.5, "estimate": True}, "not for running"),
        ],
    )
    def test_options_of_the_backend(self, options, problem):
        model = torch.compile(net(), backend="recoup", options=options)
        with pytest.raises(Exception, match=problem):
            model(images())

    def test_torch_compile_backend_wants_a_budget(self):
        model = torch.compile(net(), backend="recoup")
        with pytest.raises(Exception, match="needs a budget"):
            model(images())
