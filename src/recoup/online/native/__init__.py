"""The part of the runtime that sees every operator, in C++: built where it is first needed, and kept.

PyTorch's C++ interface differs from release to release, so no wheel can hold this for all of them. It takes a C++
compiler and half a minute, once; without one the runtime does everything in Python, to the same numbers, but slower.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from recoup.torch.progress import Reporter
from recoup.torch.session import RecoupWarning
from recoup.torch.store import default_folder

_NAME = "_recoup_watch"
_SOURCES = Path(__file__).parent
_FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden")
_LIBRARIES = ("-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python")
_SECONDS = 600


loaded: Any = None
"""The module, once it is there."""


@functools.cache
def load() -> Any:
    """The module, built if need be; None where that cannot be done, which is said once."""
    global loaded
    if sys.platform != "linux":
        return None
    try:
        built = _place()
        if not built.exists():
            with Reporter(None) as reporter:
                reporter.say("compiling the part that sees every operator, once ...")
                build(_SOURCES / "module.cpp", built)
        loaded = import_from(built)
        return loaded
    except (OSError, ImportError, subprocess.SubprocessError) as problem:
        detail = getattr(problem, "stderr", "") or str(problem)
        warnings.warn(
            f"recoup.dtr runs in Python alone, which costs time on small operators, because its C++ part could not be "
            f"built: {detail.strip().splitlines()[0] if detail.strip() else type(problem).__name__}. It needs a C++ "
            f"compiler (g++ or clang++, or the one that CXX names) and Python's headers",
            RecoupWarning,
            stacklevel=4,
        )
        return None


def _place() -> Path:
    """Where it is kept: by all that it was made from."""
    sources = b"".join(path.read_bytes() for path in sorted(_SOURCES.glob("*.[ch]*")))
    versions = f"{torch.__version__} {torch.version.git_version} {sys.version} {_FLAGS}".encode()
    made_from = hashlib.sha256(sources + versions).hexdigest()[:16]
    return default_folder() / "native" / made_from / f"{_NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"


def build(source: Path, target: Path) -> None:
    """Compile an extension of PyTorch."""
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler")
    name = f"-DTORCH_EXTENSION_NAME={target.name.partition('.')[0]}"
    includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    libraries = [f"-L{path}" for path in library_paths()]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # two processes may build at once
        output = Path(folder) / target.name
        command = [compiler, *_FLAGS, name, *includes, str(source), *libraries, *_LIBRARIES, "-o", str(output)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        output.replace(target)


def import_from(path: Path) -> Any:
    """The module in a file."""
    spec = importlib.util.spec_from_file_location(path.name.partition(".")[0], path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
