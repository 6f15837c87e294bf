"""Reading and writing files so that errors are clear and a crash never leaves half a file behind."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from recoup.errors import RecoupError


def read_bytes(path: str | Path, error: type[RecoupError]) -> bytes:
    """The file's bytes; what the system says is wrong becomes ``error``."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as problem:
        raise error(f"cannot read {str(path)!r}: {getattr(problem, 'strerror', None) or problem}") from problem


def write_text(path: str | Path, text: str) -> None:
    """As :func:`write_bytes`, in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write through a temporary file beside the target, so the target is old or new, never half."""
    check_writable(path)
    target = Path(path)
    try:
        handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(scratch, 0o666 & ~umask)
            os.replace(scratch, target)
        except BaseException:
            os.unlink(scratch)
            raise
    except OSError as problem:
        raise RecoupError(f"cannot write {str(path)!r}: {problem.strerror or problem}") from problem


def check_writable(path: str | Path) -> None:
    """Say before long work that its result could not be written."""
    target = Path(path)
    folder = target.absolute().parent
    if not str(path) or target.is_dir():
        raise RecoupError(f"cannot write {str(path)!r}: it is a folder")
    if not folder.is_dir():
        raise RecoupError(f"cannot write {str(path)!r}: there is no folder {str(folder)!r}")
    if not os.access(folder, os.W_OK):
        raise RecoupError(f"cannot write {str(path)!r}: the folder {str(folder)!r} is not writable")
