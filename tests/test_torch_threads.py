"""Two models in two threads: each by its plan, and with the random numbers that it drew."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import recoup
from tests.torch_helpers import QUICK, repeats, tight

pytestmark = pytest.mark.usefixtures("one_thread")


def model():
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Dropout(0.5))))


def test_masks_are_the_same_again(cache):
    """The step is linear, so its gradient times the input is its output, if both have the same masks."""
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


def test_a_plan_is_followed_while_another_thread_compiles(cache, monkeypatch):
    planned = recoup.optimize(model(), budget=1.0, cache=cache, **QUICK)
    planned(torch.randn(64, 32)).sum().backward()
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # as PyTorch does, for all threads
    assert torch.compiler.is_compiling()
    planned(torch.randn(64, 32)).sum().backward()
    assert planned._compiled_call_impl._recoup_session.calls == 1
