"""``recoup.optimize`` and ``recoup.plan``: the doors to everything in this package."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

import torch
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from recoup.errors import BudgetError, CaptureError, RecoupError, RecoupWarning, SettingError
from recoup.planfile import Plan
from recoup.torch.internals.calls import call_instead, called_instead, called_plainly, calls_itself, is_called_past
from recoup.torch.internals.dynamo import (
    active_mode,
    breaks_since,
    compile_dynamo,
    count_breaks,
    is_traced,
    is_transformed,
)
from recoup.torch.nested import tensors_in
from recoup.torch.part import Part, Planned
from recoup.torch.session import Session
from recoup.torch.settings import Mode, Options, RunOptions, Settings
from recoup.torch.store import Where
from recoup.units import Budget

Target = TypeVar("Target", bound=Callable[..., Any])
_SESSION = "_recoup_session"


@overload
def optimize(target: Target, /, budget: Budget = None, **options: Unpack[RunOptions]) -> Target: ...
@overload
def optimize(
    target: None = None, /, budget: Budget = None, **options: Unpack[RunOptions]
) -> Callable[[Target], Target]: ...
def optimize(
    target: Any = None,
    /,
    budget: Budget = None,
    *,
    compile: Mode | None = None,
    planner: str = "auto",
    time_limit: float | None = 30.0,
    gap: float | None = None,
    cache: Where = True,
    verbose: bool | None = None,
    reserve: int | str = 0,
    plan: Plan | str | Path | None = None,
) -> Any:
    """Make a model, or a function that returns a loss, train inside ``budget`` bytes of its device's memory.

    A module is optimized in place and returned: same class, parameters, buffers, hooks and ``state_dict`` keys. A
    function is wrapped; with the loss inside, the loss is planned too. Without a target this is a decorator::

        model = recoup.optimize(model, budget="6GiB")

        @recoup.optimize(budget=0.5)
        def loss(x, y):
            return F.cross_entropy(model(x), y)

    The budget counts everything that PyTorch has allocated on the device at the step's peak: parameters, gradients,
    optimizer state, inputs and what the step makes. It is bytes (``"6GiB"``, an integer), a fraction of the plain
    step's peak (``0.5``), or ``"auto"``: what is free on the device, less 5 %. When more is resident than was planned
    for, the step is planned again; ``reserve`` leaves room ahead of time. Calls without gradients run as before.

    ``compile`` is ``"inductor"`` (the default on CUDA) or ``"eager"``; ``planner``, ``time_limit`` and ``gap`` are
    those of :func:`recoup.solve`; ``cache`` is a folder, True or False; ``plan`` is one made by :func:`recoup.plan`,
    or its file. ``verbose`` shows progress; by default on a terminal.
    """
    settings = Settings.of(
        budget,
        plan=plan,
        compile=compile,
        planner=planner,
        time_limit=time_limit,
        gap=gap,
        cache=cache,
        verbose=verbose,
        reserve=reserve,
    )
    if target is None:
        return lambda function: _optimized(function, settings)
    return _optimized(target, settings)


def _optimized(target: Any, settings: Settings) -> Any:
    session = Session(settings)
    planned = _planned(_step_of(target), session)
    if isinstance(target, nn.Module):
        call_instead(target, planned)
    else:
        functools.update_wrapper(planned, target)
    setattr(planned, _SESSION, session)  # after update_wrapper, which takes over the session of one optimized before
    return target if isinstance(target, nn.Module) else planned


def _step_of(target: Any) -> Callable[..., Any]:
    """What one call of the target runs, if that is what a plan can take the place of."""
    name = getattr(target, "__name__", type(target).__name__)
    if isinstance(target, DistributedDataParallel):
        raise CaptureError("optimize the model first: DistributedDataParallel(recoup.optimize(model, ...))")
    if isinstance(target, type):
        raise CaptureError(f"{name} is a class: optimize a model, which is an instance of it")
    if not callable(target):
        raise CaptureError(f"{name} is neither a module nor a function")
    if any(test(part) for part in (target, type(target).__call__, getattr(target, "forward", None)) for test in _LATER):
        raise CaptureError(f"{name} returns before it has computed anything: optimize what it calls or awaits")
    if not isinstance(target, nn.Module):
        return target  # type: ignore[no-any-return]
    if is_called_past(target):
        raise CaptureError(
            f"{name} is not called as other modules are, so no plan can be put in its place: optimize a function that "
            "calls it, or, of TorchScript, the module that it was made of"
        )
    if any(map(is_lazy, (*target.parameters(), *target.buffers()))):
        raise CaptureError(
            f"{name} has lazy layers, whose parameters have no sizes yet: run it once on an example, in eval mode and "
            "under torch.no_grad(), which gives them theirs, and then optimize it"
        )
    return called_plainly(target)


_LATER = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)


def _planned(function: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """``function`` through Dynamo, with every captured part planned; as it is where no gradient is wanted."""
    compiled, look_again = compile_dynamo(function, functools.partial(_backend, session))

    def planned(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or is_traced((*args, *kwargs.values())):
            return function(*args, **kwargs)
        session.begin()
        before = count_breaks()
        try:
            result = compiled(*args, **kwargs)
        except BaseException as problem:
            with suppress(RecoupWarning):  # as an error it would hide the problem
                session.note_breaks(breaks_since(before))
            if isinstance(problem, RecoupError):
                raise problem.with_traceback(None) from None  # the way through Dynamo says nothing to the user
            if session.calls == 0:
                look_again()
            raise
        session.note_breaks(breaks_since(before))
        if session.calls == 0:  # nothing was captured
            look_again()
        if session.calls == 0 and is_transformed():
            raise CaptureError(
                "inside a torch.func transform (grad, vmap) nothing can be planned: optimize what applies it instead"
            )
        if session.calls == 0 and _computed(result, (args, kwargs)):
            if (mode := active_mode()) is not None:
                why = f"{mode} is on, a TorchDispatchMode, under which it captures nothing: call it outside of that"
            else:
                where = _listed(session) or "torch.compile(..., fullgraph=True) says where capturing stops"
                why = f"{where}. Where that is to stay, recoup.dtr trains it within a budget, without recoup.optimize"
            raise CaptureError(f"torch.compile captured nothing of this step, so it ran unplanned: {why}")
        return result

    return planned


def _computed(result: Any, given: Any) -> bool:
    """Whether a gradient flows through anything in the result that was not given."""
    known = {id(tensor) for tensor in _tensors(given)}
    return any(tensor.grad_fn is not None and id(tensor) not in known for tensor in _tensors(result))


def _tensors(thing: Any) -> Iterator[Tensor]:
    """Also in what PyTorch was told how to take apart (pytrees)."""
    return (tensor for leaf in tree_leaves(thing) for tensor in tensors_in(leaf))


def _backend(session: Session, module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
    part = Part(session, module)
    session.parts.append(part)
    return part


def plans(target: Any) -> list[Plan]:
    """The plans that an optimized model or function uses now, one for each part that has run."""
    call = called_instead(target) if isinstance(target, nn.Module) else target
    session = getattr(call, _SESSION, None)
    if session is None:
        raise CaptureError("this was not optimized by recoup")
    return [part.current.plan for part in session.parts if part.current is not None and part.current.plan is not None]


def plan(
    target: Callable[..., Any], inputs: Any, budget: Budget, *, estimate: bool = False, **options: Unpack[Options]
) -> Plan:
    """Plan one step of a model or function on ``inputs``: a tensor, a tuple of arguments, or a dict of keyword ones.

    In eager mode no operator of the step is run; in compiled mode it is tried out and undone. Save the result with
    :meth:`recoup.Plan.save` and use it with ``recoup.optimize(model, plan=...)``. The options are those of
    :func:`recoup.optimize`.

    With ``estimate`` the plan is for a GPU that is not here: the model lies on the CPU, is traced and not run, and
    operators cost their arithmetic and bytes at a GPU's rates. It says what would fit, and is not for running.
    """
    if "plan" in options:
        raise SettingError("plan= is for recoup.optimize, which runs a plan; this makes one")
    session = Session(Settings.of(budget, estimate=estimate, **options), only_plan=True)
    planned = _planned(_step_of(target), session)
    args, kwargs = arguments(inputs)
    try:
        _in_place(target, planned)(*args, **kwargs)
    except (Planned, BudgetError) as done:
        if session.breaks:
            why = f"a plan holds one graph, and this program is not captured whole: {_listed(session)}"
            raise CaptureError(why) from None
        if isinstance(done, BudgetError):
            raise
        return done.plan
    raise CaptureError("nothing in this step needs a gradient, so there is nothing to plan")


def _in_place(target: Callable[..., Any], planned: Callable[..., Any]) -> Callable[..., Any]:
    """What to call for ``planned`` to be given what it is given once the target is optimized: a module's class may have
    a ``__call__`` of its own. The module itself, which may be in use, stays as it is."""
    if not isinstance(target, nn.Module) or not calls_itself(target):
        return planned
    shell: nn.Module = object.__new__(type(target))
    vars(shell).update(vars(target))
    call_instead(shell, planned)
    return shell


def _listed(session: Session) -> str:
    return "; ".join(map(str, session.breaks.values()))


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from what a user calls a model's inputs."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})
