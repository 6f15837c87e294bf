"""The part of DTR's runtime that is in C++: what it lets pass, and what happens where it cannot be built."""

import gc

import pytest
import torch
from torch import nn

import recoup
from recoup.online import native, runtime
from recoup.torch.session import RecoupWarning
from tests.counting import counted, counter

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def asked(monkeypatch):
    """The operators that came to Python, under blocks that see in C++."""
    seen = []
    run = runtime.Runtime._run

    def listen(self, func, args, kwargs):
        seen.append(str(func))
        return run(self, func, args, kwargs)

    monkeypatch.setattr(runtime.Runtime, "_run", listen)
    with counted(monkeypatch):
        yield seen


class Training:
    """A step with batch norms, operators in place, and an optimizer."""

    def __init__(self, layers=8):
        torch.manual_seed(0)
        blocks = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(layers)]
        self.model = nn.Sequential(*(layer for block in blocks for layer in block))
        self.x = torch.randn(16, 8, 16, 16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, foreach=True)

    def step(self):
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak(self):
        self.step()
        gc.collect()
        counter().reset_peak()
        self.step()
        return counter().peak()


def test_with_room_hardly_anything_comes_to_python(asked):
    training = Training()
    with recoup.dtr("1GiB", device="cpu", learn=False) as run:
        for _ in range(4):
            training.step()
        asked.clear()
        for _ in range(5):
            training.step()
    assert set(asked) <= {"profiler._record_function_exit._RecordFunction"}
    assert run.report.evictions == 0


def test_with_less_only_what_is_evicted_or_has_no_room_does(asked):
    training = Training()
    peak = training.peak()
    with recoup.dtr(int(0.7 * peak), device="cpu", learn=False) as run:
        for _ in range(5):
            training.step()
        asked.clear()
        before = run.report.evictions, run.report.rematerializations
        for _ in range(5):
            training.step()
        evicted, repeated = run.report.evictions - before[0], run.report.rematerializations - before[1]
    assert evicted > 0
    assert repeated > 0
    assert len(asked) <= 4 * (evicted + repeated) < 5 * 100
    assert run.report.peak_bytes <= int(0.7 * peak)


def test_a_familiar_step_passes_but_for_its_first_operator(asked):
    training = Training()
    with recoup.dtr("1GiB", device="cpu") as run:
        while not run._learner.familiar:
            training.step()
        asked.clear()
        for _ in range(5):
            training.step()
    assert len(asked) <= 5 * 3  # the first, and where a profiler would begin and end


def test_storages_exchange_their_memory():
    one, other = torch.arange(4.0), torch.arange(8.0)
    native.load().exchange(one.untyped_storage(), other.untyped_storage())
    assert (one.untyped_storage().nbytes(), other.untyped_storage().nbytes()) == (32, 16)
    assert one.tolist() == [0, 1, 2, 3]
    one.untyped_storage().resize_(0)
    native.load().exchange(one.untyped_storage(), torch.full((4,), 7.0).untyped_storage())
    assert one.tolist() == [7] * 4


def test_without_a_compiler_python_does_everything(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "default_folder", lambda: tmp_path)
    monkeypatch.setattr(native, "loaded", None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(RecoupWarning, match="no-such-compiler.*It needs a C\\+\\+ compiler"):
        assert native.load.__wrapped__() is None
