"""Python's garbage collector while a block runs.

The runtime makes many small objects, so the collector comes often, and each time looks at all that PyTorch has ever
imported: a fifth of a second. What is there when the block begins is therefore left out of its sight, until memory runs
short and everything must be looked at.
"""

from __future__ import annotations

import gc

from recoup.torch.memory import freeze, is_frozen, unfreeze


class Collector:
    """Leaves alone what was there before, unless somebody else has asked for that already."""

    def __init__(self) -> None:
        self._froze = False

    def begin(self) -> None:
        """Collect, and look at what is left no more."""
        gc.collect()
        if not is_frozen():
            freeze()
            self._froze = True

    def collect(self) -> None:
        """Look at everything."""
        self.end()
        self.begin()

    def end(self) -> None:
        """Everything is looked at again from now on."""
        if self._froze:
            unfreeze()
            self._froze = False
