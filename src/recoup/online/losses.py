"""Contents whose bytes are gone, or that can never be made again, and what follows from that for those made from them.

The paper's banishing (Appendix C.4): if the bytes of a fixed content go for good, all that was made from it becomes
fixed in turn.
"""

from __future__ import annotations

from collections.abc import Callable

from recoup.online.contents import Content
from recoup.online.pool import Pool


class Losses:
    """Deals with them, as far as nothing needs to be brought back; ``told`` hears of what becomes fixed."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.told: Callable[[Content], None] | None = None

    def lose_bytes(self, content: Content) -> None:
        """Its bytes go, and it can be made again."""
        content.leave()
        self._pool.gone(content)

    def lament(self, content: Content, awaited: bool) -> None:
        """What follows from the loss of its bytes for what was made from it; ``awaited``: not all of that is known."""
        if not awaited and not self._pool.has_dependents(content):
            self._pool.withdraw(content)
            content.resident = True  # so that nobody brings it back
            return
        self.lose_bytes(content)
        if content.call is None:
            self.forsake(content)

    def forsake(self, content: Content) -> None:
        """The bytes of a content that cannot be made again are gone: neither can anything made from it."""
        stack = [content]
        while stack:
            lost = stack.pop()
            for dependent in self._pool.dependents(lost):
                if dependent.call is not None:
                    self.fix(dependent)
                    if not dependent.resident:
                        stack.append(dependent)
            self._pool.forget_dependents(lost)

    def fix(self, content: Content) -> None:
        """From now on it cannot be made again; what is away and will be made from it must keep it alive."""
        self._pool.needs.given_up(content)
        if self.told is not None:
            self.told(content)
        content.call = None
        content.keeps = ()
        self._pool.withdraw(content)
        if content.resident:
            for dependent in self._pool.dependents(content):
                if not dependent.resident:
                    dependent.keeps = (*dependent.keeps, content.memory())
