"""The part of DTR's runtime that is in C++: what it lets pass, and what happens where it cannot be built."""

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import recoup
from recoup.errors import RecoupWarning
from recoup.online import native
from recoup.online.adapter import below_autograd
from tests.counting import counted, counter, listen

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def asked(monkeypatch):
    """The operators that came to Python, under blocks that see in C++."""
    with counted(monkeypatch):
        yield listen(monkeypatch)


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


# what was made from what, where contents change and die unseen by Python


def over_then_its_source(p, x, z):
    s = p * x
    y = s.exp()
    s.add_(z)
    p.mul_(z)
    yield
    return [y, s]


def over_then_let_go(p, x, z):
    s = p * x
    y = s.exp()
    s.atan2_(z)
    del s
    p.mul_(z)
    yield
    return [y]


def over_and_given_out(p, x, z):
    s = p * x
    y = s.exp()
    s.add_(z)
    s.numpy()
    p.mul_(z)
    yield
    return [y, s]


def a_source_that_dies_while_another_is_unread(p, x, z):
    f = p.clone()
    made = torch.atan2(f, x)
    y = torch.hypot(made, x)
    yield
    w = made.exp()
    del made, f
    yield
    return [y, w]


def over_while_something_is_away(p, x, z):
    f = p.clone()
    s = torch.hypot(f, x)
    y = torch.fmod(s, x)
    yield
    s.atan2_(x)
    del f
    yield
    return [y, s]


def another_storage(p, x, z):
    y = p * x
    t = torch.empty(0)
    t.set_(p.untyped_storage(), 0, p.shape, p.stride())
    p.mul_(z)
    yield
    return [y, t]


def a_cycle(p, x, z):
    s = p * x
    v = z.exp()
    y = s * v
    s.add_(y)
    w = s.sin()
    del s, v, y
    for _ in range(1500):  # so many that what is over is forgotten
        x + x
    p.mul_(x)
    yield
    return [w]


class Doubling(TorchDispatchMode):
    """A user's own mode, which changes results."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.exp.default else result


def under_a_mode(p, x, z):
    with Doubling():
        y = (p * x).exp()
    yield
    return [y]


def within_a_subclass(p, x, z):
    pair = TwoTensor(p * x, x * z)
    pair.a.add_(z)
    y = pair.exp()
    yield
    pair.a.mul_(z)
    yield
    return [y.a, y.b, pair.a]


def many_between(p, x, z):
    s = p * x
    y = s.exp()
    s.add_(z)
    w = s.sin()
    for _ in range(10):
        x + x
    yield
    s.mul_(w)
    v = s * y
    yield
    p.mul_(z)
    del s, w
    yield
    return [v, y]


PROGRAMS = (
    over_then_its_source, over_then_let_go, over_and_given_out, a_source_that_dies_while_another_is_unread,
    over_while_something_is_away, another_storage, a_cycle, under_a_mode, within_a_subclass, many_between,
)  # fmt: skip


def drive(program, evict, times=1):
    """Results of a program that yields where everything should be evicted that may be."""
    for _ in range(times):
        generator = program(*(torch.linspace(low, 2, 256) for low in (0.1, 0.5, 0.9)))
        try:
            while True:
                next(generator)
                evict()
        except StopIteration as end:
            results = end.value
    return [result.clone() for result in results]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("size", [1, 2**40, None], ids=["the oldest", "all but recent", "all"])
def test_programs_that_confuse_what_was_made_from_what(asked, program, known, size):
    theirs = drive(program, lambda: None)
    with recoup.dtr("1GiB", device="cpu", learn=False) as run:

        def evict():
            run._journal.read() if size is None else run._journal.skim(size)
            with below_autograd():
                for content in run._keeper._pool.living():
                    run._keeper.evict(content)

        if known:  # to C++: it has seen each operator often enough
            drive(program, lambda: None, times=4)
        ours = drive(program, evict)
    assert run.report.evictions > 0 or program is another_storage or size is not None
    for mine, yours in zip(ours, theirs, strict=True):
        assert torch.equal(mine, yours)


def test_what_dies_while_it_is_away_and_nobody_has_read_what_was_made_from_it(asked):
    def program():
        a = x * 2
        others = [x + number for number in range(20)]  # so that only these, and what was made before, are read
        return a, others, a + 1

    x = torch.ones(64)
    with recoup.dtr("1GiB", device="cpu", learn=False) as run:
        for _ in range(4):
            program()
        asked.clear()
        a, others, b = program()
        assert asked == []
        run._journal.skim(2**40)
        with below_autograd():
            run._keeper.evict(run._keeper.register.find(a))
        assert run.report.evictions == 1
        del a
        run._journal.read()
        content = run._keeper.register.find(b)
        assert not content.fixed
        with below_autograd():
            run._keeper.evict(content)
        assert run.report.evictions == 2
        assert torch.equal(b, torch.full((64,), 3.0))
        assert len(others) == 20
