"""The part of DTR's runtime that is in C++: what it lets pass, and what happens where it cannot be built."""

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import recoup
from recoup.errors import RecoupWarning
from recoup.online import native
from tests.counting import counter

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_with_less_hardly_anything_does_either(asked):
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
    assert len(asked) <= 5 * 4  # what is written over for good, and where a profiler would begin and end
    assert run.report.peak_bytes <= int(0.7 * peak)


@pytest.mark.parametrize("backward", [False, True])
def test_no_memory_for_an_operator_that_is_known(asked, backward):
    x = torch.zeros(2**16, requires_grad=True)
    held = []

    def hold(tensor):
        for _ in range(8):
            held.append(tensor.detach().exp().numpy())  # which cannot be evicted

    with recoup.dtr(counter().allocated() + 6 * x.nbytes, device="cpu", learn=False):
        for _ in range(4):
            x.detach().exp()
        y = x.sin()
        y.register_hook(hold)
        asked.clear()
        with pytest.raises(recoup.BudgetError, match=r"aten\.exp needs .* are in use"):
            y.square().sum().backward() if backward else hold(x)
        assert "aten.exp.default" not in asked
        held.clear()
        assert x.exp().sum().item() == 2**16


def test_a_step_found_while_memory_is_short_is_followed(asked):
    weight = torch.randn(2**14, requires_grad=True)
    x = torch.randn(2**14)

    def step():
        h = x * weight
        for _ in range(16):
            h = torch.sigmoid(torch.tanh(h))
        torch.autograd.grad(h.sum(), [weight])

    step()
    budget = counter().allocated() + 12 * x.nbytes + 300
    with recoup.dtr(budget, device="cpu") as run:
        counter().reset_peak()
        begin = time.monotonic()
        while run.report.followed < 2 and time.monotonic() - begin < 100:
            step()
        assert counter().peak() <= budget
    assert run.report.followed >= 2


def test_a_block_leaves_nothing_behind(asked):
    def block():
        with recoup.dtr("1GiB", device="cpu") as run:
            torch.ones(8).exp()
        return weakref.ref(run._journal), weakref.ref(run._keeper), weakref.ref(run._learner)

    left = block()
    block()
    gc.collect()
    assert [reference() for reference in left] == [None] * 3


def crowd(x, times=14):
    """So much at a time that memory runs short, and Python reads what is there."""
    del [torch.exp(x) for _ in range(times)][:]


def made_in_python_from_what_is_fixed(p, x):
    for _ in range(4):  # known to C++ after that
        torch.lgamma(p)
        p.mul_(0.9)
        torch.exp(x)
    h = torch.lgamma(p)
    crowd(x)
    p.mul_(0.5)  # h cannot be made again any more
    y = torch.cat([h, h])
    del h
    crowd(x)
    return y + 0


def given_out_after_a_write(p, x):
    for _ in range(4):
        torch.exp(torch.tanh(p).add_(x))
    h = torch.tanh(p)
    crowd(x)
    h.add_(x)
    array = h.numpy()
    y = torch.exp(h)
    array[:] = 0
    crowd(x, 20)
    return y + 0


@pytest.mark.parametrize("program", [made_in_python_from_what_is_fixed, given_out_after_a_write])
@pytest.mark.parametrize("room", [7, 9, 11, 13])
@pytest.mark.filterwarnings("ignore:results of")
def test_programs_that_run_short_of_memory(asked, program, room):
    def inputs():
        return torch.linspace(0.1, 2, 2**15), torch.linspace(0.5, 3, 2**15)

    theirs = program(*inputs())
    p, x = inputs()
    with recoup.dtr(counter().allocated() + room * x.nbytes, device="cpu", learn=False) as run:
        assert torch.equal(program(p, x), theirs)
        assert run.report.evictions > 0


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


@torch.library.custom_op("recoup_tests::foreign", mutates_args=())
def foreign(x: torch.Tensor) -> torch.Tensor:
    """Its result is in memory that is not PyTorch's."""
    return torch.from_numpy(np.full(x.shape, 2.0))


def test_bytes_of_another_library_do_not_count(asked):
    with recoup.dtr("1GiB", device="cpu") as run:
        keeper = run._keeper
        keeper.look()
        before = keeper.memory
        x = torch.from_numpy(np.ones(1000))
        assert keeper.content_of(x).size == 0
        torch.ones(1000, dtype=x.dtype, out=x)
        for _ in range(10):
            y = foreign(x)
        assert keeper.content_of(x).size == keeper.content_of(y).size == 0
        assert keeper.content_of(y).fixed
        del x, y
        assert keeper.memory == before == counter().allocated()


def test_of_many_processes_one_builds(monkeypatch, tmp_path):
    compiler, built = tmp_path / "compiler", tmp_path / "folder" / "built"
    compiler.write_text(f'#!/bin/sh\necho once >> {tmp_path}/log\nsleep 0.5\nfor last; do :; done\ntouch "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor(3) as pool:  # a lock is the open file's: to it they are processes
        list(pool.map(lambda _: native._build(tmp_path / "source", built, "name"), range(3)))
    assert built.exists()
    assert (tmp_path / "log").read_text() == "once\n"
