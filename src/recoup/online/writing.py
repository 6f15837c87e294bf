"""A run of a step that repeats: its values in order, and, once, all of it written down for a planner."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recoup.graph import Graph
from recoup.online.contents import Content
from recoup.online.learned import Learned
from recoup.online.notes import Note, Notes
from recoup.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Ran:
    """An operator that has run: what it read, and what it made anew and in place of what."""

    name: str
    known: Learned
    reads: Sequence[Content | None]
    fresh: Sequence[Content]
    over: Sequence[tuple[Content, Content]]
    """Contents that it wrote over, and those that are there now."""
    once: bool
    """Whether it cannot be repeated."""

    @property
    def makes(self) -> list[Content]:
        """All that it made."""
        return [*self.fresh, *(new for _, new in self.over)]


class Values:
    """What one run of the step has made so far. Contents of other runs have other marks."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._made: list[weakref.ref[Content] | None] = []

    def __len__(self) -> int:
        return len(self._made)

    def next_run(self) -> Values:
        """None yet, of the run after this one."""
        return Values(self._first + len(self._made))

    def add(self, contents: Sequence[Content]) -> None:
        """The next values."""
        for content in contents:
            content.mark = self._first + len(self._made)
            self._made.append(weakref.ref(content))

    def skip(self, count: int) -> None:
        """The next values are not known."""
        self._made += [None] * count

    def put(self, number: int, contents: Sequence[Content | None]) -> None:
        """These were skipped, and are known now."""
        for place, content in enumerate(contents, number):
            if content is not None and place < len(self._made):
                content.mark = self._first + place
                self._made[place] = weakref.ref(content)

    def content(self, number: int) -> Content | None:
        """A value's content, unless it is gone for good, or never was known."""
        made = self._made[number]
        return None if made is None else made()

    def numbers(self, contents: Iterator[Content]) -> list[int]:
        """Which values these are; those of other runs are left out."""
        return [content.mark - self._first for content in contents if content.mark >= self._first]

    def held(self) -> list[int]:
        """The values that the program can still reach."""
        return [one for one in range(len(self._made)) if (content := self.content(one)) is not None and content.held]


class Writer:
    """Writes a run down, operator by operator."""

    def __init__(self, resident_bytes: int, values: Values) -> None:
        self.counts: list[int] = []
        """How many values there are before each operator."""
        self.ends: dict[int, int] = {}
        """Before which operator the program lets go of a value, or has written over it."""
        self.replaced: set[int] = set()
        """Values that were written over."""
        self._values = values
        self._notes = Notes(resident_bytes)
        self._repeatable: set[int] = set()
        self._fixed: dict[int, int] = {}
        """Values that cannot be made again any more from this operator on."""

    def before(self) -> None:
        """The next operator begins; it may turn out to do nothing that matters here."""
        self.counts.append(len(self._values))
        self._notes.operators.append(Note())

    def after(self, ran: Ran) -> None:
        """It has run, and what it made is among the values."""
        values, note = self._values, self._notes.operators[-1]
        note.name, note.once = ran.name, ran.once
        note.seconds, note.workspace = ran.known.cost, ran.known.workspace
        note.reads = values.numbers(one for one in ran.reads if one is not None)
        note.makes = [self._notes.value(content.size) for content in ran.makes]
        replaced = [pair for pair in map(values.numbers, map(iter, ran.over)) if len(pair) == 2]
        note.over = (replaced[0][0], replaced[0][1]) if replaced else None
        for old, _ in replaced:
            self.ends[old] = len(self.counts)
            self.replaced.add(old)
        if ran.once:  # it may have changed what others were made from: those must have been there, and stay
            fixed = {one for one in self._repeatable if (content := values.content(one)) is None or content.fixed}
            note.reads += [one for one in fixed if (content := values.content(one)) is not None and content.held]
            self._fixed.update(dict.fromkeys(fixed, len(self.counts) - 1))
            self._repeatable -= fixed
        else:
            self._repeatable.update(note.makes)

    def released(self, content: Content) -> None:
        """The program let go of a content."""
        for number in self._values.numbers(iter((content,))):
            self.ends[number] = len(self.counts)

    @property
    def made(self) -> int:
        """How many values there are at the end."""
        return len(self._notes.sizes)

    def graph(self, strict: bool = False) -> Graph:
        """The whole step. What is read after it could not be made again any more must stay: every operator that cannot
        be repeated reads it until then. A schedule may still make it again in between, see :meth:`allows`; if it is
        ``strict``, nothing makes such a value twice."""
        operators, late = self._notes.operators, self._late()
        if strict:
            for note in operators:
                note.once = note.once or not late.keys().isdisjoint(note.makes)
        else:
            for one, (first, last) in late.items():
                for note in operators[first + 1 : last]:
                    if note.once and note.reads and one not in note.reads:
                        note.reads.append(one)
        return self._notes.graph(self._values.held())

    def allows(self, schedule: Schedule) -> bool:
        """Whether the schedule makes nothing again that cannot be."""
        late, ops = self._late(), schedule.graph.ops
        ran: set[int] = set()
        position = 0
        for op in schedule.ops.tolist():
            if op not in ran:
                ran.add(op)
                position = int(ops[op].id)
            elif any(int(one) in late and late[int(one)][0] <= position for one in ops[op].outputs):
                return False
        return True

    def _late(self) -> dict[int, tuple[int, int]]:
        """The values that are read after they could not be made again any more: since when, and until when."""
        last = {one: position for position, note in enumerate(self._notes.operators) for one in note.reads}
        return {one: (since, last[one]) for one, since in self._fixed.items() if since < last.get(one, -1)}
