"""The part of the runtime that sees every operator, in C++: built where it is first needed, and kept.

PyTorch's C++ interface differs from release to release, so no wheel can hold this for all of them. It takes a C++
compiler and up to a minute, once; without one the runtime does everything in Python, to the same numbers, but slower.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from recoup.errors import RecoupWarning
from recoup.torch.progress import Reporter
from recoup.torch.store import default_folder

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
        loaded = load_from(Path(__file__).parent / "module.cpp")
    except (OSError, ImportError, subprocess.SubprocessError) as problem:
        detail = (getattr(problem, "stderr", "") or str(problem)).strip() or type(problem).__name__
        warnings.warn(
            f"recoup.dtr runs in Python alone, which costs time on small operators, because its C++ part could not be "
            f"built: {detail.splitlines()[0]}. It needs a C++ compiler (g++ or clang++, or the one that CXX names) and "
            f"Python's headers",
            RecoupWarning,
            stacklevel=5,  # where the block begins
        )
    return loaded


def load_from(source: Path) -> Any:
    """An extension of PyTorch from its source and the headers beside it; compiled if it never was, for this PyTorch."""
    made_of = [source.read_bytes()] + [header.read_bytes() for header in sorted(source.parent.glob("*.h"))]
    versions = f"{torch.__version__} {torch.version.git_version} {sys.version} {_FLAGS}".encode()
    folder = hashlib.sha256(b"".join([*made_of, versions])).hexdigest()[:16]
    name = f"recoup_{source.stem}"
    built = default_folder() / "native" / folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not built.exists():
        with Reporter(None) as reporter:
            reporter.say("compiling the part that sees every operator, once ...")
            _build(source, built, name)
    spec = importlib.util.spec_from_file_location(name, built)
    if spec is None or spec.loader is None:
        raise ImportError(f"{built} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(source: Path, target: Path, name: str) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler")
    includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    libraries = [*(f"-L{path}" for path in library_paths()), *_LIBRARIES]
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(target.parent), tempfile.TemporaryDirectory(dir=target.parent) as folder:
        if target.exists():  # another process was first
            return
        output = Path(folder) / target.name
        command = [compiler, *_FLAGS, f"-DTORCH_EXTENSION_NAME={name}", *includes, str(source), *libraries]
        subprocess.run([*command, "-o", str(output)], check=True, capture_output=True, text=True, timeout=_SECONDS)
        output.replace(target)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Where many processes begin at once, as in distributed training, one builds and the others wait for it."""
    import fcntl  # not on Windows, where nothing is built

    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: each builds its own, and the last one stays
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open, too
        os.close(handle)
