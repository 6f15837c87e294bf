"""The published log format: one JSON object a line, each an instruction of a PyTorch program (Appendix C.6).

A CALL is followed by a MEMORY and an ALIAS for each of its results, a CONSTANT by a MEMORY; numbers are strings. Here
they are read together: what the simulator is told is a CONSTANT, CALL, MUTATE, COPY, COPY_FROM or RELEASE, complete.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recoup.errors import LogError


@dataclass(frozen=True, slots=True)
class Constant:
    """A parameter or an input."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Call:
    """An operator; ``aliases`` holds for each result the position of the argument that it is a view of, or -1."""

    op: str
    args: tuple[str, ...]
    results: tuple[str, ...]
    sizes: tuple[int, ...]
    aliases: tuple[int, ...]
    cost: int


@dataclass(frozen=True, slots=True)
class Mutate:
    """An operator that changes some of its arguments, by position."""

    op: str
    args: tuple[str, ...]
    changed: tuple[int, ...]
    cost: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A new name for a tensor."""

    target: str
    source: str


@dataclass(frozen=True, slots=True)
class CopyFrom:
    """A name that had a tensor now has another's."""

    target: str
    source: str


@dataclass(frozen=True, slots=True)
class Release:
    """A name is gone."""

    name: str


@dataclass(frozen=True, slots=True)
class Annotate:
    """A remark: START and what the recorder had to say."""

    text: str


Instruction = Constant | Call | Mutate | Copy | CopyFrom | Release | Annotate


def read_log(path: str | Path) -> list[Instruction]:
    """The instructions of a log, gzipped or not; a broken line is an error with its number."""
    try:
        data = Path(path).read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except FileNotFoundError as problem:
        how = f"`with recoup.record({str(path)!r}):` around a program writes one"
        raise LogError(f"there is no file {str(path)!r}; {how}") from problem
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as problem:
        raise LogError(f"cannot read {str(path)!r}: {getattr(problem, 'strerror', None) or problem}") from problem
    return list(parse_log(text.splitlines()))


def parse_log(lines: Iterable[str]) -> Iterator[Instruction]:
    """The instructions of a log's lines."""
    reader = _Reader(lines)
    for line in reader:
        yield reader.instruction(line)


class _Reader:
    """Lines with their numbers, parsed, so that an error can say where it is."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = enumerate(lines, 1)
        self.number = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        for number, text in self._lines:
            self.number = number
            if text.strip():
                try:
                    line = json.loads(text)
                except ValueError:
                    raise self.error("is not JSON") from None
                if not isinstance(line, dict):
                    raise self.error("is not an object")
                return line
        raise StopIteration

    def error(self, what: str) -> LogError:
        return LogError(f"line {self.number} {what}")

    def instruction(self, line: dict[str, Any]) -> Instruction:
        kind = self.text(line, "INSTRUCTION")
        if kind == "CONSTANT":
            name = self.text(line, "NAME")
            return Constant(name, self._memory(name))
        if kind == "CALL":
            return self._call(line)
        if kind == "MUTATE":
            args = self._names(line, "ARGS")
            changed = line.get("MUTATE")
            if not isinstance(changed, list) or not all(_is_index(place, args) for place in changed):
                raise self.error("has no MUTATE with positions among ARGS")
            return Mutate(str(line.get("NAME", "")), args, tuple(int(place) for place in changed), self._cost(line))
        if kind in ("COPY", "COPY_FROM"):
            make = Copy if kind == "COPY" else CopyFrom
            return make(self.text(line, "DST"), self.text(line, "SRC"))
        if kind == "RELEASE":
            return Release(self.text(line, "NAME"))
        if kind == "ANNOTATE":
            return Annotate(self.text(line, "ANNOTATION"))
        raise self.error(f"has the instruction {kind!r}, which stands alone nowhere or is unknown")

    def _call(self, line: dict[str, Any]) -> Call:
        args, results, cost = self._names(line, "ARGS"), self._names(line, "RESULT"), self._cost(line)
        sizes, aliases = [], []
        for name in results:
            sizes.append(self._memory(name))
            follows = self._follow("ALIAS", name)
            alias = self.integer(follows, "ALIAS", least=-1)
            if alias >= len(args):
                raise self.error(f"makes {name!r} a view of argument {alias}, and there are {len(args)}")
            aliases.append(alias)
        return Call(str(line.get("NAME", "")), args, results, tuple(sizes), tuple(aliases), cost)

    def _memory(self, name: str) -> int:
        return self.integer(self._follow("MEMORY", name), "MEMORY")

    def _follow(self, kind: str, name: str) -> dict[str, Any]:
        line = next(self, None)
        if line is None:
            raise LogError(f"the log ends where the {kind} of {name!r} should be")
        if line.get("INSTRUCTION") != kind or line.get("NAME") != name:
            raise self.error(f"should be the {kind} of {name!r}")
        return line

    def _cost(self, line: dict[str, Any]) -> int:
        return self.integer(line, "TIME")

    def _names(self, line: dict[str, Any], key: str) -> tuple[str, ...]:
        names = line.get(key)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.error(f"has no {key} with names")
        return tuple(names)

    def text(self, line: dict[str, Any], key: str) -> str:
        if not isinstance(line.get(key), str):
            raise self.error(f"has no {key}")
        return str(line[key])

    def integer(self, line: dict[str, Any], key: str, least: int = 0) -> int:
        try:
            value = int(line[key])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise self.error(f"has no {key} with a whole number") from None
        if isinstance(line[key], float | bool):
            raise self.error(f"has no {key} with a whole number")
        if value < least:
            raise self.error(f"has {key} {value}; the least is {least}")
        return value


def _is_index(place: Any, args: tuple[str, ...]) -> bool:
    return isinstance(place, int) and not isinstance(place, bool) and 0 <= place < len(args)


def format_log(instructions: Iterable[Instruction]) -> Iterator[str]:
    """The lines of a log."""
    for item in instructions:
        for line in _lines(item):
            yield json.dumps(line, separators=(",", ":"), sort_keys=True)


def _lines(item: Instruction) -> Iterator[dict[str, Any]]:
    match item:
        case Constant(name, size):
            yield {"INSTRUCTION": "CONSTANT", "NAME": name}
            yield {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(size)}
        case Call(op, args, results, sizes, aliases, cost):
            call = {"INSTRUCTION": "CALL", "NAME": op, "ARGS": list(args), "RESULT": list(results), "TIME": str(cost)}
            yield call
            for name, size, alias in zip(results, sizes, aliases, strict=True):
                yield {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(size)}
                yield {"INSTRUCTION": "ALIAS", "NAME": name, "ALIAS": str(alias)}
        case Mutate(op, args, changed, cost):
            yield {
                "INSTRUCTION": "MUTATE", "NAME": op, "ARGS": list(args), "MUTATE": list(changed), "TIME": str(cost),
            }  # fmt: skip
        case Copy(target, source):
            yield {"INSTRUCTION": "COPY", "DST": target, "SRC": source}
        case CopyFrom(target, source):
            yield {"INSTRUCTION": "COPY_FROM", "DST": target, "SRC": source}
        case Release(name):
            yield {"INSTRUCTION": "RELEASE", "NAME": name}
        case Annotate(text):
            yield {"INSTRUCTION": "ANNOTATE", "ANNOTATION": text}
