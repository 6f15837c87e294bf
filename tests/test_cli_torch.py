"""`recoup profile`, `run` and `demo`."""

import gc
import importlib.util
import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

import torch

from recoup import Graph, RecoupError, Schedule, simulate
from recoup.cli import cli
from recoup.cli.demo import _room
from recoup.torch import workload
from recoup.torch.compare import compare
from recoup.torch.memory import measure_peak
from recoup.units import format_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ("--device", "cpu", "--steps", "1", "--time-limit", "1")
MAKE = """
from dataclasses import dataclass

import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Dropout(dropout), nn.Tanh()) for _ in range(6))
        self.layers[3][0].weight = self.layers[0][0].weight
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x, *, shift=0.0):
        for layer in self.layers:
            x = layer(x) + shift
        return x * self.scale

class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return {"out": self.linear(x).tanh(), "count": 3}

def make():
    print("hello from make")
    y = torch.randn(256, 32)
    return Tied(), torch.randn(256, 32), lambda out: nn.functional.mse_loss(out, y)

def random():
    return Tied(dropout=0.1), *make()[1:]

def keywords():
    return Tied(), {"x": torch.randn(256, 32), "shift": torch.full((), 0.5)}

def alone():
    return Alone(), (torch.randn(256, 32, requires_grad=True),)

@dataclass
class Out:
    count: int
    out: torch.Tensor

class Wraps(Alone):
    def forward(self, x):
        return Out(**super().forward(x))

def a_dataclass():
    return Wraps(), torch.randn(256, 32)

def frozen():
    return Alone().requires_grad_(False), torch.randn(4, 32)

def vector_loss():
    return Alone(), torch.randn(4, 32), lambda out: out["out"]

def broken():
    raise ValueError("no data here")

def no_tuple():
    return Alone()

def no_loss():
    return Alone(), torch.randn(4, 32), 0.5

def wrong_shape():
    return Alone(), torch.randn(4, 31)

number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, cache):
    """A working directory with the models above, and measurements shared within this file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("models", "package", "package.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MAKE)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text(MAKE)
    return tmp_path


def recoup(*arguments, code=0):
    """The command in this process; what it printed to stdout."""
    done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.stdout


def rows(text):
    data = json.loads(text)
    return data, {row["name"]: row for row in data["rows"]}


def test_profile_writes_the_captured_graph():
    data = json.loads(recoup("profile", "models.py:make", "--device", "cpu", "-o", "graph.json", "--json"))
    graph = Graph.load("graph.json")
    plain = simulate(graph, Schedule.default(graph))
    assert graph.name == "models.py:make"
    assert (data["ops"], data["values"]) == (len(graph.ops), len(graph.values))
    assert data["peak_bytes"] == plain.peak_bytes
    assert data["resident_bytes"] == graph.resident_bytes
    assert data["seconds"] == plain.cost > 0
    weights = 4 * (5 * 32 * 32 + 6 * 32 + 32)
    inputs = 4 * 2 * 256 * 32  # x, and y inside the loss
    assert weights + inputs <= graph.resident_bytes
    assert data["peak_bytes"] >= graph.resident_bytes + weights + 6 * 4 * 256 * 32  # gradients, and what tanh saves
    assert len(data["most_expensive"]) == 5
    times = [kind["seconds"] for kind in data["most_expensive"]]
    assert times == sorted(times, reverse=True)
    assert sum(times) <= data["seconds"]
    assert any("mse_loss" in op.name or "pow" in op.name for op in graph.ops)  # the loss is inside


def test_profile_prints_a_table():
    text = recoup("profile", "models.py:keywords", "--device", "cpu", "-o", "graph.json")
    graph = Graph.load("graph.json")
    peak = simulate(graph, Schedule.default(graph)).peak_bytes
    assert f"peak      {format_bytes(peak)} with nothing recomputed" in text
    assert f"ops       {len(graph.ops)}" in text
    assert "aten.mm.default x" in text
    assert "written   graph.json" in text


def test_profile_of_a_built_in_model():
    small = json.loads(recoup("profile", "gpt:2", "--device", "cpu", "--json"))
    large = json.loads(recoup("profile", "gpt:8", "--device", "cpu", "--json"))
    assert small["ops"] == large["ops"] > 100
    assert small["peak_bytes"] < large["peak_bytes"]


@pytest.mark.parametrize("source", ["models.py:make", "models.py:random"])
def test_run_keeps_the_budget_and_the_gradients(source):
    data, row = rows(recoup("run", source, "--budget", "0.7", *QUICK, "--json"))
    assert list(row) == ["plain", "recoup", "torch.utils.checkpoint", "PyTorch's own budget"]
    assert (data["device"], data["compile"]) == ("cpu", "eager")
    assert row["recoup"]["peak_bytes"] <= data["budget_bytes"]
    assert row["recoup"]["predicted_peak_bytes"] <= data["budget_bytes"]
    assert row["recoup"]["peak_bytes"] <= 0.75 * row["plain"]["peak_bytes"]
    assert row["recoup"]["gradient_difference"] == 0.0
    assert row["torch.utils.checkpoint"]["gradient_difference"] == 0.0
    assert row["torch.utils.checkpoint"]["peak_bytes"] < row["plain"]["peak_bytes"]
    assert row["torch.utils.checkpoint"]["note"] == "6 blocks"
    assert row["PyTorch's own budget"]["note"] == "activation_memory_budget needs --compile inductor"
    assert row["PyTorch's own budget"]["peak_bytes"] is None
    assert all(row[name]["seconds"] > 0 for name in ("plain", "recoup", "torch.utils.checkpoint"))


def test_run_prints_the_same_as_a_table():
    lines = recoup("run", "package.inner:make", "--budget", "0.4MiB", *QUICK).splitlines()
    assert "package.inner:make on cpu, eager, in 409.6 KiB" in [line.strip() for line in lines]
    assert all(len(line) <= 80 and "…" not in line for line in lines)
    planned = next(line for line in lines if line.startswith("recoup"))
    assert planned.split()[-1] == "0"
    assert "PyTorch's own budget: activation_memory_budget needs --compile inductor" in lines


def peak_alone(work):
    def step():
        work.loss(work.model(work.inputs)).backward()

    step()
    work.model.zero_grad(set_to_none=True)
    return measure_peak(step, torch.device("cpu"))


def test_each_contender_has_the_device_to_itself():
    """The plain peak beside three others is the plain peak alone."""

    def work():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8)))
        return workload.Workload("tanh", model, torch.randn(512, 64), lambda out: out.square().mean())

    gc.collect()
    peak = peak_alone(work())
    found = compare(work(), "0.6", torch.device("cpu"), "eager", steps=1, time_limit=1)
    assert found.plain.peak_bytes == peak
    assert found.planned.peak_bytes <= found.budget_bytes
    assert "the same gradients, bit for bit" in found.verdict()
    assert f"{100 * (1 - found.planned.peak_bytes / peak):.0f} % less memory" in found.verdict()


def test_a_difference_in_gradients_is_seen(monkeypatch):
    true = workload._checkpointed
    monkeypatch.setattr(workload, "_checkpointed", lambda *args, **kwargs: 1.5 * true(*args, **kwargs))
    _, row = rows(recoup("run", "models.py:make", "--budget", "0.7", *QUICK, "--json"))
    assert row["torch.utils.checkpoint"]["gradient_difference"] > 1e-4
    assert row["recoup"]["gradient_difference"] == 0.0


@pytest.mark.parametrize("made", ["alone", "a_dataclass"])
def test_a_model_without_blocks_and_without_a_loss(made):
    _, row = rows(recoup("run", f"models.py:{made}", "--budget", "1.0", *QUICK, "--json"))
    assert row["torch.utils.checkpoint"]["note"] == "no nn.Sequential or nn.ModuleList of blocks in this model"
    assert row["torch.utils.checkpoint"]["peak_bytes"] is None
    assert row["recoup"]["gradient_difference"] == 0.0


def test_a_peer_that_fails_says_so(monkeypatch):
    def fails(*_args, **_kwargs):
        raise ValueError("cannot be checkpointed")

    monkeypatch.setattr(workload, "_checkpointed", fails)
    _, row = rows(recoup("run", "models.py:make", "--budget", "0.7", *QUICK, "--json"))
    assert row["torch.utils.checkpoint"]["note"] == "failed: ValueError: cannot be checkpointed"
    assert row["recoup"]["gradient_difference"] == 0.0


def test_the_longest_sequence_is_what_one_would_checkpoint():
    linear = torch.nn.Linear
    nested = torch.nn.Sequential(torch.nn.ModuleList([linear(1, 1)]), torch.nn.Sequential(linear(1, 1), linear(1, 1)))
    assert workload.blocks(nested) == list(nested[1])
    assert workload.blocks(linear(1, 1)) == []


def as_a_user(*arguments):
    """The real command, in a process of its own."""
    command = [sys.executable, "-m", "recoup", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=120)


def test_a_budget_that_cannot_be_met():
    done = as_a_user("run", "models.py:make", "--budget", "90KiB", *QUICK)
    assert (done.returncode, done.stdout) == (3, "hello from make\n")
    assert "error: a budget of 90 KiB is not enough for this step" in done.stderr
    assert done.stderr.strip().endswith("works")
    data = json.loads(recoup("run", "models.py:make", "--budget", "90KiB", *QUICK, "--json", code=3))
    assert data["model"] == "models.py:make"
    assert "needs at least" in data["error"]


def test_json_is_one_object_and_nothing_else():
    done = as_a_user("run", "models.py:keywords", "--budget", "0.9", *QUICK, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert list(data) == ["model", "device", "compile", "budget_bytes", "rows"]
    assert data["rows"][1]["peak_bytes"] <= data["budget_bytes"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("resnet51", "'resnet51' is no model: give package.module:make"),
        ("resnet50:0", "after the colon comes a batch or 'full'"),
        ("resnet50:huge", "after the colon comes a batch or 'full'"),
        ("missing.py:make", "there is no file 'missing.py'"),
        ("nowhere.at_all:make", "there is no module 'nowhere.at_all'"),
        ("package.nothing:make", "there is no module 'package.nothing'"),
        ("models.py:absent", "models.py has no function 'absent'"),
        ("models:number", "models has no function 'number'"),
        ("models:", "'models:' is no model"),
        ("models.py:broken", "calling it failed: ValueError: no data here"),
        ("models.py:no_tuple", "it must return (model, inputs) or (model, inputs, loss), not Alone"),
        ("models.py:no_loss", "the loss must be a function of the model's output, not float"),
        ("syntax.py:make", "importing syntax.py failed: SyntaxError"),
    ],
)
@pytest.mark.parametrize("command", [("profile",), ("run", "--budget", "0.5")])
def test_bad_sources(folder, command, source, message):
    (folder / "syntax.py").write_text("def make(:\n")
    with pytest.raises(RecoupError) as error:
        recoup(*command, source, "--device", "cpu")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("models.py:frozen", "needs a gradient"),
        ("models.py:vector_loss", "must be a scalar tensor that needs a gradient, not a tensor of shape (4, 32)"),
        ("models.py:wrong_shape", "the step fails as it is: RuntimeError"),
    ],
)
def test_steps_that_do_not_train(source, message):
    with pytest.raises(RecoupError) as error:
        recoup("run", source, "--budget", "1.0", *QUICK)
    assert message in str(error.value)


@pytest.mark.parametrize("budget", ["lots", "1.5", "5parsecs", "auto"])
def test_budgets_that_mean_nothing(budget):
    for command in (("run", "models.py:broken"), ("demo",)):
        with pytest.raises(RecoupError, match="a fraction"):
            recoup(*command, "--device", "cpu", "--budget", budget)


COMMANDS = [("profile", "resnet50"), ("run", "resnet50", "--budget", "0.5"), ("demo",)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", COMMANDS)
def test_no_cuda(command):
    with pytest.raises(RecoupError, match="finds no CUDA device here; use --device cpu"):
        recoup(*command, "--device", "cuda")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_torch(command, monkeypatch):
    true = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else true(name, *rest))
    with pytest.raises(RecoupError, match=r"this command needs PyTorch: pip install 'torch"):
        recoup(*command)


@pytest.mark.parametrize("command", ["profile", "run", "demo"])
def test_help_teaches(command):
    text = recoup(command, "--help")
    assert "Examples:" in text
    assert f"  recoup {command}" in text


def test_demo_of_another_model():
    text = recoup("demo", "--device", "cpu", "--model", "vit", "--budget", "1.0")
    lines = text.splitlines()
    assert lines[0].startswith("One training step of vit:64 on cpu, with ")
    assert "100 % of the memory it takes" in text
    assert lines[-1].startswith("recoup: the same gradients, bit for bit, ")
    with pytest.raises(RecoupError, match="no model is named 'unett'; known: vgg16"):
        recoup("demo", "--model", "unett")


@pytest.mark.parametrize(
    ("budget", "room"),
    [("0.6", "60 % of the memory it takes"), ("6GiB", "6GiB"), ("auto", "what is free on the device")],
)
def test_the_demo_says_how_much_room_there_is(budget, room):
    assert _room(budget) == room


@pytest.mark.slow
def test_demo():
    data, row = rows(recoup("demo", "--device", "cpu", "--json"))
    assert row["recoup"]["gradient_difference"] == 0.0
    assert row["recoup"]["peak_bytes"] <= data["budget_bytes"]
    assert row["recoup"]["peak_bytes"] <= 0.605 * row["plain"]["peak_bytes"]
    assert "the same gradients, bit for bit" in data["verdict"]


@pytest.mark.slow
def test_run_compiled():
    data, row = rows(recoup("run", "models.py:make", "--compile", "inductor", "--budget", "0.9", *QUICK, "--json"))
    assert data["compile"] == "inductor"
    assert row["recoup"]["peak_bytes"] <= data["budget_bytes"]
    assert row["PyTorch's own budget"]["note"] == "activation_memory_budget=0.9"
    assert row["PyTorch's own budget"]["peak_bytes"] > 0
    assert all(entry["gradient_difference"] < 1e-5 for entry in row.values())
