"""The ``recoup-graph`` file format, version 1: strict to read, byte-stable to write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from recoup.errors import GraphError, RecoupError
from recoup.graph import Graph, Implementation, Op, Value

FORMAT, VERSION = "recoup-graph", 1

_MISSING = object()


def parse(text: str | bytes) -> Graph:
    """Read a graph; every way a file can be wrong is a :class:`GraphError`."""
    return from_data(parse_json(text, GraphError))


def parse_json(text: str | bytes, error: type[RecoupError]) -> Any:
    """Strict JSON: no NaN, no duplicate keys, and one error type whatever is wrong with the text."""

    def refuse_constant(name: str) -> NoReturn:
        raise error(f"{name} is not a number a graph can hold")

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise error(f"the key {twice!r} appears twice in one object")
        return data

    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        if not text.lstrip()[:1] == "{":
            raise error("not JSON: expected an object that starts with '{'")
        return json.loads(text, parse_constant=refuse_constant, object_pairs_hook=refuse_duplicates)
    except UnicodeDecodeError as problem:
        raise error(f"not a text file: byte {problem.start} is not UTF-8") from None
    except json.JSONDecodeError as problem:
        cut = " (is the file cut short?)" if problem.pos >= len(problem.doc.rstrip()) - 1 else ""
        raise error(f"not JSON: {problem.msg} at line {problem.lineno}, column {problem.colno}{cut}") from None
    except RecursionError:
        raise error("not a graph: nested too deeply") from None
    except ValueError as problem:
        if isinstance(problem, RecoupError):
            raise
        raise error(f"not a graph: {problem}") from None


def from_data(data: Any) -> Graph:
    """A graph from parsed JSON."""
    top = Fields(data, "the graph")
    if top.take("format") != FORMAT:
        raise GraphError(f"format is {data['format']!r}; this is not a {FORMAT} file")
    version = top.take("version")
    if version != VERSION or isinstance(version, bool):
        raise GraphError(f"version {version!r} is not supported; this recoup reads version {VERSION}")
    graph = {
        "values": tuple(_value(item, i) for i, item in enumerate(top.list("values"))),
        "ops": tuple(_op(item, i) for i, item in enumerate(top.list("ops"))),
        "outputs": top.strings("outputs"),
        "resident_bytes": top.take("resident_bytes"),
        "resident_scaling_bytes": top.take("resident_scaling_bytes", 0),
        "name": top.string("name", ""),
        "time_unit": top.string("time_unit", "s"),
    }
    top.done()
    return Graph(**graph)


def _value(data: Any, position: int) -> Value:
    fields = Fields(data, f"value number {position}")
    name = fields.string("id")
    fields.where = f"value {name!r}"
    value = Value(name, fields.take("bytes"), fields.flag("scales", True))
    fields.done()
    return value


def _op(data: Any, position: int) -> Op:
    fields = Fields(data, f"op number {position}")
    ident = fields.string("id")
    fields.where = f"op {ident!r}"
    if "implementations" in data:
        many = fields.list("implementations")
        if not many:
            raise GraphError(f"op {ident!r}: implementations is empty")
        implementations = tuple(_implementation(item, i, ident) for i, item in enumerate(many))
    else:
        implementations = (_body(fields, name="", inplace=None),)
    op = Op(
        id=ident,
        implementations=implementations,
        name=fields.string("name", ""),
        phase=fields.take("phase"),
        optional=fields.flag("optional", False),
        once=fields.flag("once", False),
        meta=fields.mapping("meta"),
    )
    fields.done()
    return op


def _implementation(data: Any, position: int, op: str) -> Implementation:
    fields = Fields(data, f"op {op!r}, implementation number {position}")
    name = fields.string("name")
    fields.where = f"op {op!r}, implementation {name!r}"
    inplace: tuple[str, str] | None = None
    if fields.data.get("inplace") is not None:
        pair = fields.strings("inplace")
        if len(pair) != 2:
            raise GraphError(f"{fields.where}: inplace must be [input, output]")
        inplace = (pair[0], pair[1])
    else:
        fields.take("inplace", None)
    implementation = _body(fields, name, inplace)
    fields.done()
    return implementation


def _body(fields: Fields, name: str, inplace: tuple[str, str] | None) -> Implementation:
    return Implementation(
        inputs=fields.strings("inputs"),
        outputs=fields.strings("outputs"),
        time=fields.take("time"),
        workspace=fields.take("workspace", 0),
        inplace=inplace,
        name=name,
    )


class Fields:
    """One JSON object, taken apart key by key; what is left at the end is an unknown key."""

    def __init__(self, data: Any, where: str, error: type[RecoupError] = GraphError) -> None:
        if not isinstance(data, dict):
            raise error(f"{where} must be an object, not {_short(data)}")
        self.data: dict[str, Any] = data
        self.where, self.error = where, error
        self.seen: set[str] = set()

    def take(self, key: str, default: Any = _MISSING) -> Any:
        """The value, whatever it is."""
        self.seen.add(key)
        found = self.data.get(key, default)
        if found is _MISSING:
            raise self.error(f"{self.where} has no {key!r}")
        return found

    def list(self, key: str) -> list[Any]:
        """A list of anything."""
        return cast("list[Any]", self._typed(key, _MISSING, list, "a list"))

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of ids."""
        for item in self.list(key):
            if not isinstance(item, str):
                raise self.error(f"{self.where}: {key} must list ids, not {_short(item)}")
        return tuple(self.data[key])

    def string(self, key: str, default: Any = _MISSING) -> str:
        """A string."""
        return cast(str, self._typed(key, default, str, "a string"))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return cast(bool, self._typed(key, default, bool, "true or false"))

    def number(self, key: str) -> float | None:
        """A number or null."""
        found = self.take(key)
        if found is not None and (isinstance(found, bool) or not isinstance(found, int | float)):
            raise self.error(f"{self.where}: {key} must be a number or null, not {_short(found)}")
        return cast("float | None", found)

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        """An object, or nothing."""
        found = self.take(key, None)
        return None if found is None else cast("Mapping[str, Any]", self._typed(key, None, dict, "an object"))

    def done(self) -> None:
        """Refuse keys that nobody took."""
        unknown = sorted(set(self.data) - self.seen)
        if unknown:
            raise self.error(f"{self.where} has the unknown key {unknown[0]!r}")

    def _typed(self, key: str, default: Any, kind: type, what: str) -> Any:
        found = self.take(key, default)
        if not isinstance(found, kind):
            raise self.error(f"{self.where}: {key} must be {what}, not {_short(found)}")
        return found


def _short(thing: Any) -> str:
    text = repr(thing)
    return text if len(text) <= 40 else text[:37] + "..."


def dump(graph: Graph) -> str:
    """The graph as compact JSON, keys in the format's own order."""
    return json.dumps(to_data(graph), separators=(",", ":"), allow_nan=False)


def to_data(graph: Graph) -> dict[str, Any]:
    """What :func:`from_data` reads."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": graph.name,
        "time_unit": graph.time_unit,
        "resident_bytes": graph.resident_bytes,
    }
    if graph.resident_scaling_bytes:
        data["resident_scaling_bytes"] = graph.resident_scaling_bytes
    data["values"] = [{"id": v.id, "bytes": v.bytes} | ({} if v.scales else {"scales": False}) for v in graph.values]
    data["ops"] = [_op_data(op) for op in graph.ops]
    data["outputs"] = list(graph.outputs)
    return data


def _op_data(op: Op) -> dict[str, Any]:
    data: dict[str, Any] = {"id": op.id, "name": op.name, "phase": op.phase}
    first = op.implementations[0]
    if len(op.implementations) == 1 and not first.name and first.inplace is None:
        data |= _body_data(first)
    else:
        data["implementations"] = [_implementation_data(impl) for impl in op.implementations]
    if op.optional:
        data["optional"] = True
    if op.once:
        data["once"] = True
    if op.meta is not None:
        data["meta"] = op.meta
    return data


def _implementation_data(impl: Implementation) -> dict[str, Any]:
    data: dict[str, Any] = {"name": impl.name} | _body_data(impl)
    if impl.inplace is not None:
        data["inplace"] = list(impl.inplace)
    return data


def _body_data(impl: Implementation) -> dict[str, Any]:
    return {
        "inputs": list(impl.inputs),
        "outputs": list(impl.outputs),
        "time": impl.time,
        "workspace": impl.workspace,
    }
