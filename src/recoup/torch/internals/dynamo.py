"""What recoup asks of Dynamo: to capture a program, where it could not, and what it passes on."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.utils import graph_break_reasons
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from recoup.errors import CaptureError

RECOMPILE_LIMIT = 64  # PyTorch's own is 8, after which it runs eagerly: fewer than the layers one may unfreeze in turn
_names = itertools.count()


def compile_dynamo(
    function: Callable[..., Any], backend: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[[], None]]:
    """``torch.compile`` with settings that leave no way past the plan; and what makes Dynamo look again.

    It does not by itself, not even at what it knows, once a call had nothing in it to capture.

    Dynamo's answer to its limit of recompilations is to run eagerly, which would break the budget without a word; here
    it is an error. The limit is per code object, and what changes from call to call is remembered by its name, so
    ``function`` gets a code object and a name of its own: else a second model would be traced with its epsilon as a
    variable. Hooks that a user adds later are noticed, and integers on modules, such as a counter of calls, are no
    reason to compile again unless something is computed with them. Inside DistributedDataParallel a step stays whole:
    by default it is cut where a bucket of gradients is full, and each piece would be planned for itself. While another
    thread traces, which Dynamo cannot tell from being traced itself, this one is planned as ever: :func:`is_traced`.
    """

    def step(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    step.__code__ = step.__code__.replace(co_name=f"step_{next(_names)}")
    compiled = torch.compile(step, backend=backend)
    settings = {
        "fail_on_recompile_limit_hit": True,
        "recompile_limit": max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit),
        "accumulated_recompile_limit": max(
            torch._dynamo.config.accumulated_recompile_limit, torch._dynamo.config.recompile_limit
        ),
        "skip_nnmodule_hook_guards": False,
        "allow_unspec_int_on_nn_module": True,
        "optimize_ddp": False,
        "force_compile_during_fx_trace": True,
    }

    def call(*args: Any, **kwargs: Any) -> Any:
        with _dynamo_set(settings):
            try:
                return compiled(*args, **kwargs)
            except torch._dynamo.exc.FailOnRecompileLimitHit as problem:
                raise CaptureError(
                    f"torch.compile gave up on this program after {settings['recompile_limit']} variants of it: it "
                    "changes in something that it is compiled for. TORCH_LOGS=recompiles says what; "
                    "torch._dynamo.config.recompile_limit, set before recoup.optimize, allows for more: "
                    f"{str(problem).splitlines()[0]}"
                ) from None

    def look_again() -> None:
        set_code_exec_strategy(step.__code__, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))

    return call, look_again


_setting = threading.Lock()
_calls: list[dict[str, Any]] = []
"""What each planned call that runs now found Dynamo set to."""


@contextmanager
def _dynamo_set(settings: dict[str, Any]) -> Iterator[None]:
    """Dynamo so set, until the last of the calls that overlap ends: in torch 2.11 settings are for all threads."""
    if not _set_for_all():
        with torch._dynamo.config.patch(settings):
            yield
        return
    config: Any = torch._dynamo.config
    with _setting:
        _calls.append(_calls[0] if _calls else {name: getattr(config, name) for name in settings})
        _assign(config, settings)
    try:
        yield
    finally:
        with _setting:
            before = _calls.pop()
            if not _calls:
                _assign(config, before)


def _assign(config: Any, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        setattr(config, name, value)


@cache
def _set_for_all() -> bool:
    """Whether another thread sees what Dynamo is set to in this one."""
    config: Any = torch._dynamo.config
    with config.patch(recompile_limit=config.recompile_limit + 1), ThreadPoolExecutor(1) as other:
        return bool(other.submit(lambda: config.recompile_limit).result() == config.recompile_limit)


def has_maximum(arg: Any) -> bool:
    """Whether the user has marked a size with its maximum: ``torch._dynamo.mark_dynamic(arg, 0, min=..., max=...)``."""
    return any(one.max is not None for one in getattr(arg, "_dynamo_dynamic_range", ()))


def active_mode() -> str | None:
    """The name of a ``TorchDispatchMode`` that is on, under which Dynamo captures nothing."""
    mode = _get_current_dispatch_mode()
    return None if mode is None else type(mode).__name__


def largest_sizes(example: Any) -> tuple[int, ...] | None:
    """The sizes of a captured input, or the number that it is, where those that vary are at their maximum.

    None where one has none that Dynamo knows of.
    """
    found: list[int] = []
    for size in example.shape if isinstance(example, torch.Tensor) else (example,):
        most = size.node.shape_env.bound_sympy(size.node.expr).upper if isinstance(size, torch.SymInt) else size
        if not getattr(most, "is_Integer", True):
            return None
        found.append(int(most))
    return tuple(found)


@dataclass(frozen=True)
class Break:
    """Why Dynamo stopped capturing the program for a while, and where in the user's code."""

    reason: str
    where: str

    def __str__(self) -> str:
        return f"{self.reason} at {self.where}"


def graph_break(module: fx.GraphModule) -> Break | None:
    """What ended this part of the program early, if anything did."""
    reason = getattr(module, "compile_subgraph_reason", None)
    return None if reason is None or not reason.graph_break else _break(reason)


def is_traced(given: Iterable[Any]) -> bool:
    """Whether this runs while somebody traces it, in this thread: ``torch.compiler.is_compiling`` is true in all."""
    return (
        torch.compiler.is_dynamo_compiling()
        or torch.compiler.is_exporting()
        or torch._C._get_tracing_state() is not None
        or get_proxy_mode() is not None
        or any(isinstance(arg, fx.Proxy) for arg in given)
    )


def is_transformed() -> bool:
    """Whether this runs inside ``torch.func.grad``, ``vmap`` or another transform, where Dynamo captures nothing."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_float_in_a_tensor(node: fx.Node) -> bool:
    """Whether this input of a captured graph is a Python float for the caller, which Dynamo passes in a tensor."""
    return bool(getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False))


def count_breaks() -> int:
    """How many there were in this process; :func:`breaks_since` says which."""
    return len(graph_break_reasons)


def breaks_since(count: int) -> list[Break]:
    """Those that Dynamo came upon since it had come upon ``count``, also where no part ends: it was not capturing.

    Whatever is being compiled at the time counts: in other threads, or by an operator that compiles something itself.
    """
    return [_break(reason) for reason in graph_break_reasons[count:]]


def _break(reason: GraphCompileReason) -> Break:
    files = [f"{frame.filename}:{frame.lineno}" for frame in reason.user_stack]
    files = [file for file in files if not file.startswith(_RECOUP)]
    own = [file for file in files if not file.startswith(_TORCH)]
    return Break(str(reason.reason).splitlines()[0], (own or files or ["its beginning"])[-1])


_RECOUP = str(Path(__file__).parents[2]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
