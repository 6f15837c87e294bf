"""What a call of an optimized model or function runs and returns: the plan is in its way, or it is refused."""

import functools
from dataclasses import InitVar, dataclass, field

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.torch.part import Part
from recoup.torch.workload import Workload
from tests.torch_helpers import QUICK

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::recoup.RecoupWarning"),
]


def test_a_path_that_computes_nothing(cache):
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, on):
            return self.layer(x) if on else x

    model, x = recoup.optimize(Skips(), budget=1.0, cache=cache, **QUICK), torch.randn(3, 4)
    assert model(x, False) is x
    assert model(x, True).grad_fn is not None


def test_a_class_is_no_model():
    for door in (recoup.optimize, lambda kind, budget: recoup.plan(kind, (3, 4), budget)):
        with pytest.raises(recoup.CaptureError, match="Linear is a class: optimize a model"):
            door(nn.Linear, budget=1.0)


def test_a_module_that_is_not_called_as_others_are():
    class Below(Past):
        pass

    class Further(Past):
        def __call__(self, x):
            return super().__call__(x)

    class Same(nn.Linear):
        __call__ = nn.Linear.forward

    class Partial(nn.Linear):
        __call__ = functools.partialmethod(nn.Linear.forward)

    class Named(nn.Linear):
        @functools.wraps(nn.Module.__call__)
        def __call__(self, x):
            return self.forward(x)

    class Indirect(nn.Linear):
        def __call__(self, x):
            return self.run(x)

        def run(self, x):
            return super().__call__(x)

    traced = torch.jit.trace(nn.Linear(3, 4), torch.randn(2, 3))
    for model in (*(kind(3, 4) for kind in (Past, Below, Further, Same, Partial, Named, Indirect)), traced):
        with pytest.raises(recoup.CaptureError, match="is not called as other modules are"):
            recoup.optimize(model, budget=1.0)
    with pytest.raises(recoup.CaptureError, match=r"Past .* optimize a function that calls it"):
        recoup.plan(Past(3, 4), torch.randn(2, 3), budget=1.0)


def test_lazy_layers_are_run_once_first(cache):
    model, x = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d()), torch.randn(4, 3)
    for door in (recoup.optimize, functools.partial(recoup.plan, inputs=x)):
        with pytest.raises(recoup.CaptureError, match=r"Sequential has lazy layers.* run it once on an example"):
            door(model, budget=1.0)
    with torch.no_grad():
        model.eval()(x)
    recoup.optimize(model.train(), budget=1.0, cache=cache, **QUICK)(x).sum().backward()
    assert model[0].weight.grad.shape == (8, 3)
    assert int(model[1].num_batches_tracked) == 1


def test_a_function_that_calls_it(cache):
    class Own(nn.Linear):
        def __call__(self, x):
            return self.forward(x).tanh()

    model, x = Own(3, 4), torch.randn(2, 3)
    plain = model(x)
    planned = recoup.optimize(lambda x: model(x), budget=1.0, cache=cache, **QUICK)
    assert torch.equal(planned(x), plain)
    assert len(recoup.plans(planned)) == 1


def annotated_as(forward):
    """What people write so that editors show ``forward`` where the module is called."""
    return functools.wraps(forward)


def unmarked(call):
    return lambda self, *args: call(self, *args)


class Counts(nn.Linear):
    calls = 0

    def __call__(self, x):
        self.calls += 1
        return super().__call__(x)


class Same(nn.Linear):
    __call__ = nn.Module.__call__


class Annotated(nn.Linear):
    @annotated_as(nn.Linear.forward)
    def __call__(self, *args):
        return nn.Module.__call__(self, *args)


class Decorated(nn.Linear):
    @unmarked
    def __call__(self, x):
        return super().__call__(x)


class Partial(nn.Linear):
    __call__ = functools.partialmethod(nn.Module.__call__)


class Inside(nn.Linear):
    def __call__(self, x):
        def run(x):
            return super(Inside, self).__call__(x)

        return run(x)


class Prepares(nn.Linear):
    def __call__(self, x):
        return super().__call__(x.float()[:, :3].repeat(4, 1))


class Keeps:
    """A decorator that is a class."""

    def __init__(self, call):
        self.call = call

    def __get__(self, model, kind=None):
        return functools.partial(self.call, model)


def kept_in_a_default(call):
    return lambda self, *args, call=call: call(self, *args)


class ByAnObject(nn.Linear):
    @Keeps
    def __call__(self, x):
        return super().__call__(x)


class ByADefault(nn.Linear):
    @kept_in_a_default
    def __call__(self, x):
        return super().__call__(x)


class Past(nn.Linear):
    def __call__(self, x):
        return self.forward(x)


class Restored(Past):
    __call__ = nn.Module.__call__


class Above(Past):
    def __call__(self, x):
        return nn.Linear.__call__(self, x)


CALLED = (Counts, Same, Annotated, Decorated, Partial, Inside, Prepares, ByAnObject, ByADefault, Restored, Above)


@pytest.mark.parametrize("kind", CALLED)
def test_a_call_of_its_own_that_ends_in_that_of_modules(cache, kind):
    x = torch.randn(2, 3 if kind is not Prepares else 6, dtype=torch.double if kind is Prepares else None)
    plan = recoup.plan(kind(3, 4), x, 1.0, cache=cache, **QUICK)
    model = recoup.optimize(kind(3, 4), plan=plan, cache=cache, compile="eager")
    model(x).sum().backward()
    assert len(recoup.plans(model)) == 1


def test_planning_a_call_that_catches_everything(cache):
    class Catches(nn.Linear):
        def __call__(self, x):
            try:
                return super().__call__(x)
            except Exception:
                raise RuntimeError("the model failed") from None

    assert recoup.plan(Catches(3, 4), torch.randn(2, 3), 1.0, cache=cache, **QUICK).graph.ops


def test_planning_leaves_what_a_call_runs_as_it_was(cache):
    model, x = nn.Linear(3, 4), torch.randn(2, 3)
    recoup.plan(model, x, 1.0, cache=cache, **QUICK)
    assert model._compiled_call_impl is None
    recoup.optimize(model, 1.0, cache=cache, **QUICK)
    model(x).sum().backward()
    [used] = recoup.plans(model)
    recoup.plan(model, x, 1.0, cache=cache, **QUICK)
    assert recoup.plans(model)[0] is used


@pytest.mark.parametrize("kind", [nn.Linear, Counts])
def test_planning_leaves_alone_a_model_in_use(cache, kind):
    """In another thread, as here while it is planned."""
    model, x = kind(3, 4), torch.randn(2, 3)
    call, used = Part.__call__, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Part, "__call__", lambda part, *args: used.append(model(x)) or call(part, *args))
        assert recoup.plan(model, x, 1.0, cache=cache, **QUICK).graph.ops
    assert torch.equal(used[0], model(x))


def test_of_a_traced_module(cache):
    model = recoup.optimize(torch.fx.symbolic_trace(nn.Linear(3, 4)), budget=1.0, cache=cache, **QUICK)
    model(torch.randn(2, 3)).sum().backward()
    assert len(recoup.plans(model)) == 1


@dataclass
class Batch:
    x: Tensor
    other: object = None


class Named(dict):
    pass


@pytest.mark.parametrize("kind", [lambda x: x, Batch, lambda x: Named(x=x), lambda x: {"x": [x]}])
def test_what_is_handed_back_was_not_computed(cache, kind):
    given = kind(torch.randn(3, requires_grad=True) * 2)
    assert recoup.optimize(lambda batch: batch, budget=1.0, cache=cache, **QUICK)(given) is given


def test_a_batch_that_holds_itself(cache):
    given = Batch(torch.ones(1))
    given.other = given
    assert recoup.optimize(lambda batch: batch, budget=1.0, cache=cache, **QUICK)(given) is given


def test_what_computes_later():
    async def waits(x):
        return x

    def yields(x):
        yield x

    class Waits(nn.Module):
        forward = waits

    class Asks:
        __call__ = waits

    for function in (waits, yields, functools.partial(waits, 1), Waits(), Asks()):
        with pytest.raises(recoup.CaptureError, match="returns before it has computed"):
            recoup.optimize(function, budget=1.0)


@dataclass(frozen=True)
class Scaled:
    x: Tensor
    scale: InitVar[float] = 0.5
    twice: Tensor | None = field(init=False, default=None)

    def __post_init__(self, scale):
        object.__setattr__(self, "x", self.x * scale)
        object.__setattr__(self, "twice", self.x * 2)


def test_a_batch_that_is_made_with_more_than_its_fields():
    [moved] = Workload("scales", nn.Linear(2, 2), [Scaled(torch.ones(2))]).on(torch.device("cpu")).inputs
    assert moved.x.tolist() == [0.5, 0.5]
    assert moved.twice.tolist() == [1.0, 1.0]


def test_a_batch_moves_with_the_model():
    given = Batch(torch.ones(2), {"y": torch.ones(3, requires_grad=True)})
    moved = Workload("copies", nn.Linear(2, 2), (given,)).on(torch.device("meta"))
    [batch] = moved.inputs
    assert batch.x.device.type == batch.other["y"].device.type == "meta"
    assert batch.other["y"].requires_grad
    assert given.x.device.type == "cpu"
