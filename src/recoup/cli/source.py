"""SOURCE and ``--device``, as the commands that run PyTorch take them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from recoup.errors import RecoupError, SettingError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from recoup.torch.settings import Mode
    from recoup.torch.workload import Workload

_FORMS = "package.module:make, path/to/file.py:make, or a built-in model such as resnet50, resnet50:8 or resnet50:full"

device_option = click.option(
    "--device", "device_name", type=click.Choice(["cpu", "cuda"]), help="[default: cuda where there is one, else cpu]"
)
compile_option = click.option(
    "--compile", "mode", type=click.Choice(["eager", "inductor"]), help="[default: inductor on cuda, eager on cpu]"
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")


def need_torch() -> None:
    """Raise where PyTorch is not installed; what its profiler logs would drown what a command prints."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if importlib.util.find_spec("torch") is None:
        raise RecoupError("this command needs PyTorch: pip install 'torch>=2.11,<2.14'")


def pick_device(name: str | None) -> torch.device:
    """The device to run on; an error if it is not there."""
    import torch

    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise RecoupError("--device cuda: PyTorch finds no CUDA device here; use --device cpu")
    if name == "cuda" or (name is None and there):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def pick_mode(name: str | None, device: torch.device) -> Mode:
    """The mode asked for, or the device's own."""
    if name is None:
        return "inductor" if device.type == "cuda" else "eager"
    return "inductor" if name == "inductor" else "eager"


def quiet_stdout(as_json: bool) -> AbstractContextManager[Any]:
    """With ``--json``, what the user's own code prints goes to stderr."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def read_workload(source: str, device: torch.device) -> Workload:
    """A built-in model, or what the user's function makes, on the device."""
    import torch

    from recoup.torch.models import MODELS
    from recoup.torch.workload import SEED, Workload

    torch.manual_seed(SEED)
    name, *parts = source.split(":")
    if name in MODELS:
        return _built_in(source, name, parts, device)
    make = _function(source, list(MODELS))
    try:
        with torch.device(device) if device.type == "cuda" else nullcontext():
            made = make()
    except Exception as problem:
        raise RecoupError(f"{source}: calling it failed: {type(problem).__name__}: {problem}") from problem
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module):
        got = f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, tuple) else type(made).__name__
        raise RecoupError(f"{source}: it must return (model, inputs) or (model, inputs, loss), not {got}")
    if len(made) == 3 and not callable(made[2]):
        raise RecoupError(f"{source}: the loss must be a function of the model's output, not {type(made[2]).__name__}")
    return Workload(source, *made).on(device)


def _built_in(source: str, name: str, parts: list[str], device: torch.device) -> Workload:
    from recoup.torch.models import example
    from recoup.torch.workload import Workload

    batch, full = None, False
    for part in parts:
        if part == "full":
            full = True
        elif part.isascii() and part.isdigit() and 0 < int(part) <= 1_000_000:
            batch = int(part)
        else:
            raise SettingError(f"{source!r}: after the colon comes a batch or 'full', as in {name}:8 or {name}:full")
    made = example(name, "full" if full else "small", batch, device)
    return Workload(source, made.model, made.inputs, made.loss)


def _function(source: str, models: list[str]) -> Callable[[], Any]:
    where, colon, name = source.rpartition(":")
    if not colon or not where or not name:
        raise RecoupError(f"{source!r} is no model: give {_FORMS} (there are {', '.join(models)})")
    module = _file(where) if where.endswith(".py") else _module(where, source)
    found = getattr(module, name, None)
    if not callable(found):
        raise RecoupError(f"{source!r}: {where} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def _module(where: str, source: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as problem:
        if problem.name is not None and (where == problem.name or where.startswith(f"{problem.name}.")):
            raise RecoupError(
                f"{source!r}: there is no module {where!r} here ({os.getcwd()}) or installed; give {_FORMS}"
            ) from problem
        raise RecoupError(f"{source!r}: importing {where} failed: {problem}") from problem
    except Exception as problem:
        raise RecoupError(f"{source!r}: importing {where} failed: {type(problem).__name__}: {problem}") from problem


def _file(where: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        raise RecoupError(f"there is no file {where!r}")
    sys.path[:0] = [str(path.resolve().parent), os.getcwd()]
    name = path.stem if path.stem not in sys.modules else f"recoup_source_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RecoupError(f"{where!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as problem:
        del sys.modules[name]
        raise RecoupError(f"importing {where} failed: {type(problem).__name__}: {problem}") from problem
    return module
