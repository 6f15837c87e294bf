"""DTR on the CPU as it runs on a GPU, where C++ sees every operator and the allocator counts."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from recoup.online import journal, native, runtime
from recoup.online.learned import SCALARS, Learned, Lessons, guessed_workspace


@cache
def counter() -> Any:
    """The CPU's allocator, with a count."""
    return native.load_from(Path(__file__).parent / "counting.cpp")


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks that begin here see in C++; small programs are read in parts, as large ones are."""
    assert native.load() is not None, "a C++ compiler is needed to test what is in C++"
    begin = runtime.Runtime.__init__

    def sees_in_cpp(self: runtime.Runtime, *args: Any) -> None:
        begin(self, *args)
        self._sees_in_cpp = True
        self._keeper.can_look = True
        self._keeper.allocated = counter().allocated

    monkeypatch.setattr(runtime.Runtime, "__init__", sees_in_cpp)
    monkeypatch.setattr(journal, "_AT_ONCE", 4)
    counter().start()
    try:
        yield
    finally:
        counter().stop()


def learn_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: where PyTorch's own convolutions run, as on ARM, they take some, which is guessed before that."""
    run, foretell = Lessons.run, Lessons._foretell

    def learns(self: Lessons, known: Learned, *call: Any) -> Any:
        counter().begin()
        guessed = known.runs == 0
        result = run(self, known, *call)
        took = counter().peak_since() - counter().allocated()
        known.workspace = max(took, SCALARS if guessed else known.workspace)
        return result

    def guesses(self: Lessons, func: Any, args: Any, kwargs: Any, tensors: Any) -> Learned:
        known = foretell(self, func, args, kwargs, tensors)
        known.workspace += guessed_workspace(func, known.size, tensors)
        return known

    monkeypatch.setattr(Lessons, "run", learns)
    monkeypatch.setattr(Lessons, "_foretell", guesses)


def listen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that come to Python from here on, by name."""
    seen: list[str] = []
    run = runtime.Runtime._run

    def heard(self: runtime.Runtime, func: Any, args: Any, kwargs: Any) -> Any:
        seen.append(str(func))
        return run(self, func, args, kwargs)

    monkeypatch.setattr(runtime.Runtime, "_run", heard)
    return seen
