"""Two models in two threads: each by its plan, and with the random numbers that it drew."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import recoup
from recoup.torch import memory, session
from recoup.torch.internals.dynamo import compile_dynamo
from recoup.torch.memory import is_alone, live_bytes, live_tensors, resident_bytes
from tests.torch_helpers import QUICK, repeats, tight

pytestmark = pytest.mark.usefixtures("one_thread")


def model():
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Dropout(0.5))))


def test_masks_are_the_same_again(cache, monkeypatch):
    """The step is linear, so its gradient times the input is its output, if both have the same masks."""
    monkeypatch.setattr(session, "TRUSTED", 1000)  # else each may see what the other holds, and have too little left
    x = torch.randn(256, 32)

    def train(planned):
        errors = []
        for _ in range(60):
            given = x.clone().requires_grad_()
            loss = planned(given).sum()
            loss.backward()
            errors.append(abs(float((given.grad * given).sum()) - float(loss)))
        return max(errors)

    models = [model(), model()]
    for planned in models:
        for layer in planned[::2]:
            nn.init.zeros_(layer.bias)
        given = x.clone().requires_grad_()
        recoup.optimize(planned, budget=tight(planned, given, 0.3, cache, slack=0.08), cache=cache, **QUICK)
        train(planned)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            errors = list(pool.map(train, models))
    finally:
        sys.setswitchinterval(interval)
    assert max(errors) < 1
    assert min(map(repeats, models)) > 0


@pytest.mark.parametrize(
    ("where", "flag"), [(torch.compiler, "_is_compiling_flag"), (torch.fx._symbolic_trace, "_is_fx_tracing_flag")]
)
def test_a_plan_is_followed_while_another_thread_traces(cache, monkeypatch, where, flag):
    planned = recoup.optimize(model(), budget=1.0, cache=cache, **QUICK)
    planned(torch.randn(64, 32)).sum().backward()
    monkeypatch.setattr(where, flag, True)  # as PyTorch does, for all threads
    planned(torch.randn(64, 32)).sum().backward()
    assert planned._compiled_call_impl._recoup_session.calls == 1


def test_a_model_trains_while_another_is_planned(cache):
    """It may have to be planned again itself meanwhile, with what the other holds."""
    trained = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())))
    x, stop = torch.randn(2048, 32), Event()
    plain = grad_of(trained, x)
    recoup.optimize(trained, budget=tight(trained, x, 0.3, cache, slack=0.08), cache=cache, **QUICK)

    def train():
        results = []
        while not stop.is_set():
            results.append(torch.equal(grad_of(trained, x), plain))
        return results

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(train)
            try:
                for size in range(20, 23):
                    other = recoup.optimize(model(), budget=1.0, cache=False, **QUICK)
                    other(torch.randn(size, 32)).sum().backward()
            finally:
                stop.set()
            results = found.result()
    finally:
        sys.setswitchinterval(interval)
    assert len(results) > 4
    assert all(results)
    assert repeats(trained) > 0
    assert len(trained._compiled_call_impl._recoup_session.parts) == 1


def test_looking_while_another_thread_clears_gradients():
    """PyTorch ends the process if a gradient is read just then; see ``live_tensors``."""
    parameters, started, stop = [nn.Parameter(torch.zeros(1000)) for _ in range(50)], Event(), Event()

    def train():
        while not stop.is_set():
            for parameter in parameters:
                parameter.grad = torch.ones(1000)
            assert all(parameter.grad is not None for parameter in parameters)
            started.set()
            for parameter in parameters:
                parameter.grad = None

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            trained = pool.submit(train)
            started.wait(20)
            try:
                for _ in range(30):
                    live_bytes(live_tensors(), torch.device("cpu"))
            finally:
                stop.set()
            trained.result()
    finally:
        sys.setswitchinterval(interval)


def test_gradients_are_counted(monkeypatch):
    """All of them while no other thread may be training; else those that Python has read."""
    parameter = nn.Parameter(torch.zeros(1000))
    monkeypatch.setattr(memory, "is_alone", lambda: True)
    before = resident_bytes(torch.device("cpu"))
    parameter.sum().backward()
    monkeypatch.setattr(memory, "is_alone", lambda: False)
    assert resident_bytes(torch.device("cpu")) == before
    monkeypatch.setattr(memory, "is_alone", lambda: True)
    assert resident_bytes(torch.device("cpu")) == before + 4000
    monkeypatch.setattr(memory, "is_alone", lambda: False)
    assert resident_bytes(torch.device("cpu")) == before + 4000  # read by the look before


def test_threads_that_wait_for_work_are_left_out(monkeypatch):
    main, there = threading.get_ident(), sys._current_frames()
    others = set(there) - {main}  # such as those of who runs the tests
    current = sys._current_frames
    monkeypatch.setattr(
        sys, "_current_frames", lambda: {thread: frame for thread, frame in current().items() if thread not in others}
    )
    started, stop = Event(), Event()

    def work():
        started.set()
        stop.wait(20)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        assert is_alone()
        busy = pool.submit(work)
        started.wait(20)
        assert not is_alone()
        stop.set()
        busy.result()
    assert is_alone()


def grad_of(trained, x):
    trained.zero_grad(set_to_none=True)
    trained(x).sum().backward()
    return trained[0].weight.grad


@pytest.mark.parametrize(
    "trace", [fx.symbolic_trace, lambda function: make_fx(function)(torch.ones(3))], ids=["fx", "make_fx"]
)
def test_what_is_traced_in_this_thread_is_what_was_written(trace):
    planned = recoup.optimize(lambda x: (x * 2).relu(), budget=1.0, **QUICK)
    ops = [node.name for node in trace(planned).graph.nodes if node.op not in ("placeholder", "output")]
    assert ops == ["mul", "relu"]
    assert planned._recoup_session.parts == []


def test_settings_of_pytorch_are_left_as_they_were():
    names = ("fail_on_recompile_limit_hit", "recompile_limit", "force_compile_during_fx_trace", "optimize_ddp")
    before = [getattr(torch._dynamo.config, name) for name in names]
    started, ended = Event(), Event()
    seen = []

    def first(x):
        started.set()
        ended.wait(20)
        return x * 2

    def second(x):
        seen.append(torch._dynamo.config.optimize_ddp)
        return x * 2

    calls = [compile_dynamo(torch._dynamo.disable(function), "eager")[0] for function in (first, second)]
    with ThreadPoolExecutor(2) as pool:
        outer = pool.submit(calls[0], torch.ones(2))
        started.wait(20)
        pool.submit(calls[1], torch.ones(2)).result()
        ended.set()
        outer.result()
    assert seen == [False]
    assert [getattr(torch._dynamo.config, name) for name in names] == before
