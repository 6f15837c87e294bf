"""One step of a live program, written down as a graph that a planner can plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from recoup.builder import GraphBuilder
from recoup.graph import Graph, Implementation


@dataclass(slots=True)
class Note:
    """One operator: the values that it read and made, by number."""

    name: str = ""
    reads: list[int] = field(default_factory=list)
    makes: list[int] = field(default_factory=list)
    over: tuple[int, int] | None = None
    """A value that it wrote over, and the one that is there now."""
    once: bool = True
    seconds: float = 0.0
    workspace: int = 0


@dataclass(slots=True)
class Notes:
    """The operators of a step so far. What the step did not make itself is resident all along."""

    resident_bytes: int
    operators: list[Note] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def value(self, size: int) -> int:
        """A new value's number."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def graph(self, held: Sequence[int]) -> Graph:
        """The whole step; ``held`` are the values that the program still holds at its end. Op ids are positions."""
        builder = GraphBuilder("a step", resident_bytes=self.resident_bytes)
        for number, size in enumerate(self.sizes):
            builder.value(str(number), size)
        for position, note in enumerate(self.operators):
            if not note.makes and not note.reads:
                continue
            over = (str(note.over[0]), str(note.over[1])) if self._writes_over(note, held) and note.over else None
            implementation = Implementation(
                tuple(map(str, dict.fromkeys(note.reads))),
                tuple(map(str, note.makes)),
                note.seconds,
                note.workspace,
                over,
            )
            builder.op(str(position), implementations=[implementation], name=note.name, once=note.once)
        return builder.build(map(str, held))

    def _writes_over(self, note: Note, held: Sequence[int]) -> bool:
        return note.over is not None and note.over[0] not in held and len({self.sizes[one] for one in note.over}) == 1
