import json
import math
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings

from recoup import Graph, GraphBuilder, GraphError, Implementation, Value
from recoup.generators import NETWORKS, chain, heterogeneous_chain, training_graph
from tests.strategies import graphs

GOOD = {
    "format": "recoup-graph",
    "version": 1,
    "name": "demo",
    "time_unit": "ms",
    "resident_bytes": 8192,
    "values": [{"id": "v0", "bytes": 4096}, {"id": "v1", "bytes": 64}, {"id": "v2", "bytes": 64}],
    "ops": [
        {
            "id": "conv1",
            "name": "aten.convolution",
            "phase": "forward",
            "inputs": ["v0"],
            "outputs": ["v1"],
            "time": 0.42,
            "workspace": 0,
        },
        {
            "id": "relu",
            "name": "aten.relu",
            "phase": "backward",
            "implementations": [
                {"name": "plain", "inputs": ["v1"], "outputs": ["v2"], "time": 1, "workspace": 0},
                {
                    "name": "over",
                    "inputs": ["v1"],
                    "outputs": ["v2"],
                    "time": 1,
                    "workspace": 0,
                    "inplace": ["v1", "v2"],
                },
            ],
            "once": True,
            "meta": {"module": "layer1.0", "shape": [1, 2]},
        },
    ],
    "outputs": ["v2"],
}


def change(path: str, value: object) -> str:
    data = json.loads(json.dumps(GOOD))
    *where, last = path.split(".")
    place = data
    for key in where:
        place = place[int(key) if key.isdigit() else key]
    key = int(last) if last.isdigit() else last
    if value is None:
        del place[key]
    else:
        place[key] = value
    return json.dumps(data)


def test_reads_and_writes_back_the_same_bytes():
    graph = Graph.from_json(json.dumps(GOOD))
    assert json.loads(graph.to_json()) == GOOD
    assert Graph.from_json(graph.to_json()).to_json() == graph.to_json()
    assert graph.to_json() == json.dumps(GOOD, separators=(",", ":"))
    op = graph.ops[1]
    assert (op.id, op.once, op.optional, len(op.implementations)) == ("relu", True, False, 2)
    assert op.implementations[1].inplace == ("v1", "v2")
    assert graph.ops[0].time == 0.42


@settings(max_examples=100, deadline=None)
@given(graphs(choices=True))
def test_round_trip(graph):
    again = Graph.from_json(graph.to_json())
    assert again == graph
    assert again.to_json() == graph.to_json()
    assert again.fingerprint == graph.fingerprint
    assert hash(again) == hash(graph)


def test_fingerprint_tells_graphs_apart():
    prints = {Graph.from_json(change("ops.0.time", t)).fingerprint for t in (0.42, 0.43, 1)}
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "onnx", "format is 'onnx'"),
        ("version", 2, "version 2 is not supported"),
        ("version", True, "version True is not supported"),
        ("resident_bytes", None, "the graph has no 'resident_bytes'"),
        ("resident_bytes", -1, "resident_bytes is negative"),
        ("resident_bytes", 1.5, "resident_bytes must be a whole number"),
        ("resident_scaling_bytes", 9000, "cannot be more"),
        ("color", 1, "the graph has the unknown key 'color'"),
        ("values", {}, "values must be a list"),
        ("values.1", 7, "value number 1 must be an object"),
        ("values.1.bytes", -5, "value 'v1': bytes is negative"),
        ("values.1.bytes", True, "value 'v1': bytes must be a whole number"),
        ("values.0.bytes", 2**62, "more than 2"),
        ("values.1.id", "v0", "two values are called 'v0'"),
        ("values.1.size", 3, "value 'v1' has the unknown key 'size'"),
        ("ops.1.id", "conv1", "two ops are called 'conv1'"),
        ("ops.0.time", -1, "op 'conv1': time is negative"),
        ("ops.0.time", "1", "op 'conv1': time must be a number"),
        ("ops.0.time", 10**400, "op 'conv1': time"),
        ("ops.0.time", None, "op 'conv1' has no 'time'"),
        ("ops.0.phase", "sideways", "op 'conv1': phase must be"),
        ("ops.0.phase", None, "op 'conv1' has no 'phase'"),
        ("ops.0.workspace", -1, "op 'conv1': workspace is negative"),
        ("ops.0.inputs", ["nope"], "op 'conv1' names the value 'nope'"),
        ("ops.0.inputs", [3], "op 'conv1': inputs must list ids"),
        ("ops.0.inputs", "v0", "op 'conv1': inputs must be a list"),
        ("ops.0.outputs", ["v1", "v1"], "op 'conv1' writes a value twice"),
        ("ops.0.outputs", ["v1", "v2"], "value 'v2' has two producers: op 'conv1' and op 'relu'"),
        ("ops.0.inputs", ["v2"], "op 'conv1' is on a cycle: conv1 -> relu -> conv1"),
        ("ops.0.inputs", ["v1"], "op 'conv1' is on a cycle: conv1 -> conv1"),
        ("ops.0.flops", 3, "op 'conv1' has the unknown key 'flops'"),
        ("ops.1.once", 1, "op 'relu': once must be true or false"),
        ("ops.1.meta", [], "op 'relu': meta must be an object"),
        ("ops.1.implementations", [], "op 'relu': implementations is empty"),
        ("ops.1.time", 3, "op 'relu' has the unknown key 'time'"),
        ("ops.1.implementations.1.name", "plain", "op 'relu': two implementations have the same name"),
        ("ops.1.implementations.1.inplace", ["v1"], r"op 'relu', implementation 'over': inplace must be \[input"),
        ("ops.1.implementations.1.inplace", ["v2", "v1"], "inplace must name one of its inputs"),
        ("ops.1.implementations.1.inputs", ["v0"], "inplace must name"),
        ("values.2.bytes", 65, "'v1' and 'v2' share memory but differ in size"),
        ("values.2.scales", False, "'v1' and 'v2' share memory but only one scales"),
        ("outputs", ["v9"], "outputs lists 'v9'"),
        ("outputs", ["v2", "v2"], "outputs lists a value twice"),
        ("outputs", ["v1"], "would overwrite 'v1', which is a required output"),
    ],
)
def test_bad_graphs_name_the_op_and_the_reason(path, value, message):
    with pytest.raises(GraphError, match=message):
        Graph.from_json(change(path, value))


def test_order_is_not_a_cycle():
    data = json.loads(json.dumps(GOOD))
    data["ops"].reverse()
    with pytest.raises(GraphError, match="op 'relu' reads 'v1', which op 'conv1' makes only later"):
        Graph.from_json(json.dumps(data))


def test_overwriting_what_is_resident():
    data = json.loads(change("values.0.bytes", 64))
    over = data["ops"][1]["implementations"][1]
    over["inputs"], over["inplace"] = ["v0"], ["v0", "v2"]
    with pytest.raises(GraphError, match="would overwrite 'v0', which is resident"):
        Graph.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[]", "expected an object"),
        ("{", "cut short"),
        (json.dumps(GOOD)[:-40], "not JSON"),
        ('{"format": "recoup-graph", "format": "x"}', "'format' appears twice"),
        (json.dumps(GOOD).replace("0.42", "NaN"), "NaN is not a number"),
        (json.dumps(GOOD).replace("0.42", "-Infinity"), "-Infinity is not a number"),
        (b"\xff\xfe\x00", "not a text file"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"version": ' + "9" * 10_000 + "}", "not a graph"),
    ],
)
def test_broken_files(text, message):
    with pytest.raises(GraphError, match=message):
        Graph.from_json(text)


def test_truncation_anywhere_is_a_graph_error():
    text = json.dumps(GOOD)
    for end in range(len(text)):
        with pytest.raises(GraphError):
            Graph.from_json(text[:end])


@pytest.mark.parametrize("kind", ["random", "zeros", "brackets", "numbers"])
def test_a_hundred_megabytes_of_nonsense(kind):
    size = 100_000_000
    text = {
        "random": lambda: random.Random(0).randbytes(1000) * (size // 1000),
        "zeros": lambda: b"0" * size,
        "brackets": lambda: b'{"a":' + b"[" * size,
        "numbers": lambda: b'{"a":[' + b"1," * (size // 20) + b"1]}",
    }[kind]()
    began = time.perf_counter()
    with pytest.raises(GraphError):
        Graph.from_json(text)
    assert time.perf_counter() - began < 20


def test_missing_file_is_a_graph_error(tmp_path):
    with pytest.raises(GraphError, match="cannot read"):
        Graph.load(tmp_path / "none.json")


def test_save_and_load(tmp_path):
    graph = chain(3)
    graph.save(tmp_path / "g.json")
    assert Graph.load(tmp_path / "g.json") == graph
    assert [p.name for p in tmp_path.iterdir()] == ["g.json"]


def test_nan_and_bad_meta_from_python():
    for time_ in (math.nan, math.inf, -1.0):
        b = GraphBuilder()
        b.op("a", outputs={"y": 1}, time=time_)
        with pytest.raises(GraphError, match="op 'a'"):
            b.build()
    b = GraphBuilder()
    b.op("a", outputs={"y": 1}, time=1, meta={"what": {1, 2}})
    with pytest.raises(GraphError, match="op 'a': meta"):
        b.build()


def test_default_schedule_must_run():
    b = GraphBuilder()
    b.op("a", outputs={"y": 1}, time=1, optional=True)
    b.op("b", inputs=["y"], outputs={"z": 1}, time=1)
    with pytest.raises(GraphError, match="op 'b' reads 'y' in its first implementation"):
        b.build()
    b = GraphBuilder()
    for name in "xyz":
        b.value(name, 1)
    b.op("a", outputs=["x"], time=1)
    b.op("b", implementations=[Implementation(("x",), ("y",), 1, inplace=("x", "y"), name="over")])
    b.op("c", inputs=["x"], outputs=["z"], time=1)
    with pytest.raises(GraphError, match="op 'c' reads 'x', which op 'b' overwrote"):
        b.build()


def test_builder_takes_numpy_integers_and_refuses_other_ids():
    b = GraphBuilder()
    b.op("a", outputs={"y": np.int64(3)}, time=1)
    assert Graph.from_json(b.build().to_json()).values[0].bytes == 3
    b = GraphBuilder()
    b.op(7, outputs={"y": 1}, time=1)
    with pytest.raises(GraphError, match="the id of every op must be a string"):
        b.build()
    for make in (lambda: chain(0), lambda: heterogeneous_chain([1, 1], [1]), lambda: training_graph("x", [])):
        with pytest.raises(GraphError):
            make()


def test_builder_refuses_two_ways_at_once():
    b = GraphBuilder()
    with pytest.raises(GraphError, match="not both"):
        b.op("a", inputs=["x"], implementations=[Implementation((), (), 1)])
    b.value("x", 1)
    with pytest.raises(GraphError, match="two values are called 'x'"):
        b.value("x", 2)


def test_graphs_are_immutable():
    meta = {"module": "a"}
    b = GraphBuilder()
    b.op("a", outputs={"y": 1}, time=1, meta=meta)
    graph = b.build()
    before = graph.to_json()
    meta["module"] = "b"
    assert graph.to_json() == before
    graph = chain(1)
    with pytest.raises(AttributeError):
        graph.name = "x"
    with pytest.raises(AttributeError):
        graph.values[0].bytes = 3
    assert graph.values[0] == Value("a1", 1)


def test_scaling_multiplies_what_scales():
    b = GraphBuilder(resident_bytes=100, resident_scaling_bytes=30)
    b.value("s", 7, scales=False)
    b.op("a", outputs={"y": 10}, time=2, workspace=3)
    b.op("b", inputs=["y"], outputs=["s"], time=2)
    big = b.build().scaled(4)
    assert [v.bytes for v in big.values] == [7, 40]
    assert (big.resident_bytes, big.resident_scaling_bytes, big.ops[0].workspace, big.ops[0].time) == (190, 120, 12, 2)


@pytest.mark.parametrize(
    ("name", "ops", "gflop", "parameters"),
    [
        ("vgg16", 43, 31.0, 138.4),
        ("vgg19", 49, 39.3, 143.7),
        ("mobilenet", 167, 1.15, 4.25),
        ("resnet50", 333, 8.3, 25.6),
        ("densenet161", 1133, 15.7, 28.7),
        ("unet", 63, 373, 31.0),
        ("fcn8", 55, 215, 134.5),
        ("segnet", 173, 316, 29.5),
    ],
)
def test_networks_have_the_published_sizes(name, ops, gflop, parameters):
    graph = NETWORKS[name](2)
    assert len(graph.ops) == ops
    forward = sum(op.time for op in graph.ops if op.phase == "forward")
    assert forward / 2e9 == pytest.approx(gflop, rel=0.02)
    fixed = graph.resident_bytes - graph.resident_scaling_bytes
    assert fixed / 8e6 == pytest.approx(parameters, rel=0.01)
