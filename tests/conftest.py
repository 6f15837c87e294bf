"""What all tests share. Random examples are new each time on a developer's machine, and the same each time in CI."""

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.torch_helpers")  # what it asserts is shown as in a test
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

_IMPORTED = 100_000  # objects, at least
_hidden: list[weakref.ref[Any]] = []
"""Tensors that the garbage collector leaves alone."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked ``full`` runs only when asked for by that name."""
    if "full" not in config.option.markexpr:
        left = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if item not in set(left)]
        config.hook.pytest_deselected(items=left)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What is marked ``gpu`` needs one."""
    if item.get_closest_marker("gpu"):
        import torch  # here, since the core's tests run without it

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="module")
def looked_at() -> None:
    """Python's garbage collector looks at everything again, and forgets what earlier files left behind."""
    from recoup.torch import memory

    memory.unfreeze()


@pytest.fixture
def one_thread(looked_at: None) -> Iterator[None]:
    """One thread, so that sums are in one order, and nothing left over from another test.

    Small tensors gain nothing from more, and on a busy machine every operator waits for the slowest thread.
    """
    import torch
    import torch._inductor.config as inductor

    from recoup.online import collector
    from recoup.torch import memory

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    gc.collect()
    if gc.get_freeze_count() < _IMPORTED:  # what PyTorch has imported need not be looked at whenever memory is counted
        _hidden[:] = [weakref.ref(tensor) for tensor in memory.live_tensors()]
        gc.freeze()
        memory._STARTUP = gc.get_freeze_count()
    there = [tensor for tensor in (known() for known in _hidden) if tensor is not None]
    in_sight = [tensor.detach() for tensor in there if memory.has_storage(tensor)]  # these still count
    del there
    accelerated = torch.backends.mkldnn.enabled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collector, "is_frozen", lambda: True)  # else the first block of DTR to end would unfreeze all
        with inductor.patch({"cpp.simdlen": 1}):  # kernels without vectors compile in two thirds of the time
            yield
    del in_sight
    torch._C._set_mkldnn_enabled(accelerated)  # PyTorch gives it up, for good, where it fails
    torch._dynamo.reset()
    torch.set_num_threads(threads)


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor's kernels do nothing, which takes no compiler: numbers mean nothing, and memory is true."""
    import torch._inductor.config as inductor
    from torch._inductor.async_compile import AsyncCompile

    for name in ("cpp", "cpp_pybinding"):
        monkeypatch.setattr(AsyncCompile, name, lambda *_args, **_options: lambda *_given: None)
    with inductor.patch(force_disable_caches=True):
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for measurements and plans that the tests of one file share."""
    return tmp_path_factory.mktemp("recoup-cache")


@pytest.fixture(params=["python", "cpp"])
def seen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Who sees a program's operators under DTR: Python all of them, as on a CPU, or C++ first, as on a GPU. The latter
    needs an allocator that counts, so the CPU's is made to."""
    if request.param == "python":
        yield
        return
    if request.node.get_closest_marker("by_tensors"):
        pytest.skip("counts tensors, not what the allocator does")
    from tests.counting import counted

    with counted(monkeypatch):
        yield


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The operators that came to Python, under blocks that see in C++."""
    from tests.counting import counted, listen

    with counted(monkeypatch):
        yield listen(monkeypatch)
