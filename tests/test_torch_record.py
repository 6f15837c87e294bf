"""What a program does becomes a log, and the simulator replays it."""

import gzip
import json

import pytest
import torch
from torch import nn

import recoup
from recoup.online import logs
from recoup.online.logs import read_log
from recoup.online.simulation import simulate_log
from recoup.torch.models import example

pytestmark = pytest.mark.usefixtures("one_thread")


def record(path):
    return recoup.record(path, device="cpu")


def test_every_line_of_a_small_program(tmp_path):
    x = torch.ones(256)
    with torch.no_grad(), record(tmp_path / "a.log"):
        y = x + 1
        z = y.view(16, 16)[:8]
        z.mul_(2)
        del z, y
    items = read_log(tmp_path / "a.log")
    assert [type(item).__name__ for item in items] == ["Annotate", "Constant", "Call", "Mutate", "Release"]
    _, constant, call, mutate, release = items
    assert constant == logs.Constant("s0", 1024)
    assert (call.op, call.args, call.results) == ("aten.add", ("s0",), ("s1",))
    assert (call.sizes, call.aliases) == ((1024,), (-1,))
    assert call.cost > 0
    assert (mutate.op, mutate.args, mutate.changed) == ("aten.mul_", ("s1",), (0,))
    assert release == logs.Release("s1")


@pytest.mark.parametrize("name", ["resnet50", "gpt"])
def test_a_training_step_is_simulated(tmp_path, name):
    torch.manual_seed(0)
    made = example(name)
    with record(tmp_path / "step.log.gz"):
        made.loss(made.model(*made.inputs)).backward()
    log = read_log(tmp_path / "step.log.gz")
    plain = simulate_log(log, None, "dtr", deallocation="banish", limit=None)
    assert plain.overhead == 0
    weights = sum(parameter.nbytes for parameter in made.model.parameters())
    assert plain.peak_bytes > 2 * weights
    tight = simulate_log(log, 0.8, "dtr", limit=None)
    assert tight.status == "ok"
    assert tight.evictions > 0
    assert tight.peak_bytes <= 0.8 * plain.peak_bytes


def test_an_interrupted_program_leaves_its_log(tmp_path):
    model = nn.Linear(4, 4)
    path = tmp_path / "a.log.gz"

    def program():
        with record(path):
            model(torch.ones(1, 4))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        program()
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert any(line.get("NAME") == "aten.addmm" for line in lines)


def test_a_place_that_cannot_be_written_is_said_before(tmp_path):
    with pytest.raises(recoup.RecoupError, match="there is no folder"):
        record(tmp_path / "nowhere" / "a.log")


def test_sparse_gradients_have_no_storage_to_name(tmp_path):
    embedding = nn.Embedding(10, 4, sparse=True)
    with record(tmp_path / "a.log"):
        embedding(torch.tensor([1, 2, 1])).sum().backward()
    assert any(getattr(item, "op", "") == "aten.embedding" for item in read_log(tmp_path / "a.log"))
