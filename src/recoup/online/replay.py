"""A log, run: names become tensors, and a mutation an operator that makes new ones (Appendix C.6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from recoup.errors import LogError
from recoup.online import logs


class Runtime(Protocol):
    """What a program is told to. Tensors are numbers."""

    def constant(self, size: int) -> int:
        """An input or a parameter."""

    def call(
        self, inputs: Sequence[int], sizes: Sequence[int], cost: float, aliases: Sequence[int | None] | None = None
    ) -> list[int]:
        """An operator, and of which tensor each output is a view, None for a new one."""

    def retain(self, tensor: int) -> None:
        """One more name for a tensor."""

    def release(self, tensor: int) -> None:
        """One name less."""

    def storage_size(self, tensor: int) -> int:
        """Bytes of the storage that the tensor looks at."""

    def finish(self) -> None:
        """The program is at its end."""


class _Names(dict[str, int]):
    def __missing__(self, name: str) -> int:
        raise LogError(f"the log uses {name!r} before it is made, or after it was released")


def replay(instructions: Sequence[logs.Instruction], run: Runtime) -> None:
    """Run the whole log; at its end what is still live is brought back and kept."""
    names = _Names()
    for item in instructions:
        if isinstance(item, logs.Call):
            given = [names[name] for name in item.args]
            views = [None if place < 0 else given[place] for place in item.aliases]
            names.update(zip(item.results, run.call(given, item.sizes, item.cost, views), strict=True))
        elif isinstance(item, logs.Release):
            run.release(names[item.name])
            del names[item.name]
        elif isinstance(item, logs.Copy):
            names[item.target] = names[item.source]
            run.retain(names[item.target])
        elif isinstance(item, logs.Constant):
            names[item.name] = run.constant(item.size)
        elif isinstance(item, logs.Mutate):
            given = [names[name] for name in item.args]
            old = [given[place] for place in item.changed]
            made = run.call(given, [run.storage_size(one) for one in old], item.cost)
            for place, before, after in zip(item.changed, old, made, strict=True):
                run.release(before)
                names[item.args[place]] = after
        elif isinstance(item, logs.CopyFrom):
            run.retain(names[item.source])
            run.release(names[item.target])
            names[item.target] = names[item.source]
    run.finish()
