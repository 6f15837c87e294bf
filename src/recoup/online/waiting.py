"""Calls that wait for their inputs to come back, each for the sake of the one before.

The inputs that are there are locked, so that they do not go while the others come back (Appendix C). A long chain of
waiting calls may so lock all there is; then those that wait longest let go, and get theirs back when it is their turn.
"""

from __future__ import annotations

import torch

from recoup.online.calls import Call
from recoup.online.contents import Content
from recoup.online.pool import Pool

_PATIENCE = 2  # times that a call which waits for its inputs lets go of those that are there
_PATIENCE_OF_ALL = 8  # times that any does, while the inputs of one operator come back


class Frame:
    """A call that waits for its inputs to come back (None: the program's own)."""

    __slots__ = ("call", "locked", "parents", "patience")

    def __init__(self, call: Call | None, parents: list[Content]) -> None:
        self.call = call
        self.parents = parents
        self.locked: dict[Content, torch.UntypedStorage] = {}
        """The inputs that are there; their storages cannot die meanwhile."""
        self.patience = _PATIENCE


class Waiting:
    """The calls that wait now, the program's own first. Ends with a ``with`` block: nothing stays locked."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._frames: list[Frame] = []
        self._patience = _PATIENCE_OF_ALL

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        while self._frames:
            self.pop()

    def push(self, call: Call | None, parents: list[Content]) -> None:
        """One more waits."""
        self._frames.append(Frame(call, parents))

    @property
    def next(self) -> Call | None:
        """The call that is to run first."""
        return self._frames[-1].call

    def missing(self) -> Content | None:
        """Lock the inputs of that call that are there; the first that is not."""
        frame = self._frames[-1]
        missing = None
        for parent in frame.parents:
            if parent in frame.locked:
                continue
            if parent.resident:
                self._pool.lock(parent)
                frame.locked[parent] = parent.memory()
            elif missing is None:
                missing = parent
        return missing

    def pop(self) -> None:
        """It has run."""
        self._release(self._frames.pop())

    def let_go(self) -> bool:
        """Nothing else is left to evict: the inputs of another call may go, if one has patience."""
        for frame in self._frames[:-1]:
            if frame.locked and frame.patience and self._patience:
                frame.patience -= 1
                self._patience -= 1
                self._release(frame)
                return True
        return False

    def _release(self, frame: Frame) -> None:
        for content in frame.locked:
            self._pool.unlock(content)
        frame.locked.clear()
