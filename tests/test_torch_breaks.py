"""What cannot be captured in one graph still trains the same, and the reason is named."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import RecoupWarning
from recoup.torch import eager, session
from recoup.torch.memory import measure_peak
from tests.torch_helpers import QUICK, Wrapped, assert_same, images, net, state

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::recoup.RecoupWarning"),
]


class Breaks(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.first = kind, net(dropout=0.2)
        self.second = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, x):
        y = self.first(x)
        if self.kind == "print":
            print("here")
        elif self.kind == "item":
            y = y * y.sum().item()
        elif y.sum() > -1e9:
            y = y * 2
        return self.second(y)


BREAKS = {"print": 'print("here")', "item": "y.sum().item()", "if": "elif y.sum() >"}


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rest = nn.Linear(32, 32), nn.ModuleList(nn.Linear(32, 32) for _ in range(30))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        for layer in self.rest:
            x = torch.tanh(layer(x))
        return x.mean()


class TestBreaks:
    @pytest.mark.parametrize("budget", [0.9, "bytes"])
    @pytest.mark.parametrize("kind", BREAKS)
    def test_a_graph_break_is_named_and_changes_nothing(self, cache, kind, budget):
        model = Breaks(kind)
        plain = copy.deepcopy(model)
        x = images()
        if budget == "bytes":
            peak = measure_peak(lambda: plain(x).square().sum().backward(), torch.device("cpu"))
            budget = int(0.9 * peak) + sum(parameter.nbytes for parameter in plain.parameters())
            plain.zero_grad(set_to_none=True)
        recoup.optimize(model, budget=budget, cache=cache, **QUICK)
        for step in range(3):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for each in (plain, model):
                    each.zero_grad(set_to_none=True)
                    torch.manual_seed(step)
                    each(x).square().sum().backward()
            assert_same(state(model), state(plain), f"step {step}")
            notes = [str(one.message) for one in caught if isinstance(one.message, RecoupWarning)]
            if step == 0:
                lines = Path(__file__).read_text().splitlines()
                line = 1 + next(
                    number
                    for number, text in enumerate(lines)
                    if text.strip().startswith(BREAKS[kind]) or text.strip().endswith(BREAKS[kind])
                )
                assert any(f"{Path(__file__).name}:{line}" in note for note in notes), notes
            if step == 2:
                assert notes == []
        assert len(recoup.plans(model)) >= 2

    def test_a_part_that_can_leave_little_leaves_less(self, cache):
        """By what they need of the plain step, the second would get nine tenths, and the first cannot be so small."""
        model, x = Deep(), torch.randn(4096, 32)
        budget = 10 * x.nbytes
        recoup.optimize(model, budget=budget, cache=cache, **QUICK)
        for _ in range(2):
            model(x).backward()
            model.zero_grad(set_to_none=True)
        assert measure_peak(lambda: model(x).backward(), torch.device("cpu")) <= budget
        assert 0 < model._compiled_call_impl._recoup_session.parts[0].share_later < 0.5

    @pytest.mark.xfail(strict=True, raises=recoup.CaptureError, reason="nothing is captured, so the step is refused")
    @pytest.mark.parametrize("kind", ["average of all batches", "inner backward hook"])
    def test_a_break_inside_a_module_of_pytorchs_own(self, cache, kind):
        norm = nn.BatchNorm2d(8, momentum=None if kind == "average of all batches" else 0.1)
        model = Wrapped(nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()))
        plain = copy.deepcopy(model)
        if kind == "inner backward hook":
            for each in (plain, model):
                each.body[0].register_full_backward_hook(lambda module, given, got: None)
        recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
        x = images()
        for each in (plain, model):
            each(x).square().sum().backward()
        assert_same(state(model), state(plain))

    def test_what_cannot_be_captured_at_all(self, cache):
        @torch.compiler.disable
        def hidden(x):
            return (x * 2).sum()

        function = recoup.optimize(hidden, budget=1.0, cache=cache, **QUICK)
        with pytest.raises(
            recoup.CaptureError, match=r"captured nothing of this step.* at its beginning.* recoup\.dtr trains it"
        ):
            function(torch.randn(3, requires_grad=True))

    def test_a_break_before_anything_is_captured(self, cache):
        model = net()

        @torch.compiler.disable
        def hidden(x):
            return model(x)

        def loss(x):
            return hidden(x).square().sum()

        here = f"{Path(__file__).name}:{loss.__code__.co_firstlineno + 1}"
        planned = recoup.optimize(loss, budget=1.0, cache=cache, **QUICK)
        with pytest.warns(RecoupWarning, match=f"what runs here is not planned: .* at .*{here}") as caught:
            planned(images()).backward()
        assert [one.category for one in caught].count(RecoupWarning) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            planned(images()).backward()
        for budget in (1.0, "1KiB"):  # more of which would not help
            with pytest.raises(recoup.CaptureError, match=f"not captured whole: .*{here}"):
                recoup.plan(loss, images(), budget, cache=cache, **QUICK)

    def test_a_note_made_an_error_hides_no_other(self, cache):
        def loss(x):
            print("here")
            raise OSError("the user's own")

        planned = recoup.optimize(loss, budget=1.0, cache=cache, **QUICK)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(OSError, match="the user's own"):
                planned(images())

    def test_a_model_with_a_python_side_effect(self, cache):
        class Counts(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.calls = net(), 0

            def forward(self, x):
                self.calls += 1
                return self.body(x)

        model = Counts()
        recoup.optimize(model, budget=1.0, cache=cache, **QUICK)
        x = images()
        for _ in range(12):
            model(x).sum().backward()
        assert model.calls == 12


@pytest.mark.parametrize(("share", "every"), [(0.7, 1), (0.9, 1), (0.9, 2)])
def test_gradients_of_later_parts_are_counted(cache, share, every):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
            self.second = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64))

        def forward(self, x):
            y = self.first(x).view(16, -1, 64).mean(1)
            print(end="")
            return self.second(y).square().mean()

    model, x = Model(), torch.randn(1024, 64)
    recoup.optimize(model, budget=share, cache=cache, **QUICK)
    for call in range(4):  # what comes after a part is known after the first call
        if call % every == 0:  # else they are accumulated
            model.zero_grad(set_to_none=True)
        model(x).backward()
    model.zero_grad(set_to_none=True)
    peak = measure_peak(lambda: model(x).backward(), torch.device("cpu"))
    assert peak <= max(plan.budget_bytes for plan in recoup.plans(model))


@pytest.mark.parametrize("budget", [0.8, "16GiB"])
def test_parts_are_planned_once_the_others_are_known_and_no_more(cache, monkeypatch, budget):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.halves = nn.ModuleList(
                nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh()))) for _ in "ab"
            )

        def forward(self, x):
            y = self.halves[0](x)
            print(end="")
            return self.halves[1](y)

    model, x = recoup.optimize(Model(), budget=budget, cache=cache, **QUICK), torch.randn(1024, 32)
    scans, compiled = [], []
    look, compile_step = session.resident_bytes, eager.compile_step
    monkeypatch.setattr(session, "resident_bytes", lambda device: scans.append(1) or look(device))
    monkeypatch.setattr(eager, "compile_step", lambda *args: compiled.append(1) or compile_step(*args))
    for call in range(6):
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        if call == 2:
            seen = len(compiled), len(scans)
    assert seen[0] <= 4
    assert (len(compiled), len(scans)) == seen  # nor is every object looked at for its memory


def test_a_small_part_before_a_large_one(cache):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.rest = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2048), nn.Tanh(), nn.Linear(2048, 4))

        def forward(self, x):
            y = self.first(x).tanh()
            print(end="")
            return self.rest(y)

    model, x = recoup.optimize(Model(), budget="1GiB", cache=cache, **QUICK), torch.randn(512, 4)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
    assert len(recoup.plans(model)) == 2
