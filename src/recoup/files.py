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
    except OSError as problem:
        raise error(f"cannot read {str(path)!r}: {problem.strerror or problem}") from problem


def write_text(path: str | Path, text: str) -> None:
    """Write through a temporary file beside the target, so the target is old or new, never half."""
    target = Path(path)
    handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(scratch, 0o666 & ~umask)
        os.replace(scratch, target)
    except BaseException:
        os.unlink(scratch)
        raise
