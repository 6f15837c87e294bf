"""DTR in C++ and Python together: what was made from what, where contents change and die unseen by Python."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import recoup
from recoup.online.adapter import below_autograd

pytestmark = pytest.mark.usefixtures("one_thread")


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
