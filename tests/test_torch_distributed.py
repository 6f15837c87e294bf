"""Several processes: a model inside DistributedDataParallel, and communication inside a model. One process will do."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed._functional_collectives import all_reduce
from torch.nn.parallel import DistributedDataParallel

import recoup
from recoup.torch import profile
from recoup.torch.estimate import estimate
from tests.torch_helpers import QUICK, assert_same, repeats, state, tight

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def group(tmp_path):
    init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    destroy_process_group()


def blocks(count=6):
    torch.manual_seed(0)
    kinds = (nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 16))
    return nn.Sequential(*(copy.deepcopy(kind) for _ in range(count) for kind in kinds))


def test_inside_distributed_data_parallel(cache):
    model, x = blocks(), torch.randn(512, 16)
    plain = copy.deepcopy(model)
    fraction = tight(model, x, 0.4, cache, 0.02)
    recoup.optimize(model, budget=fraction, cache=cache, **QUICK)
    ours, theirs = DistributedDataParallel(model), DistributedDataParallel(plain)
    for seed in range(3):
        for each in (ours, theirs):
            torch.manual_seed(seed)
            with each.no_sync():
                each(x).square().mean().backward()
            each(x).square().mean().backward()
        assert_same(state(model), state(plain))
    assert len(recoup.plans(model)) == 1
    assert repeats(model) > 0
    with pytest.raises(recoup.CaptureError, match=r"DistributedDataParallel\(recoup.optimize\(model"):
        recoup.optimize(theirs, budget=fraction)
    for parameter in (*model.parameters(), *plain.parameters()):  # the reducer holds them for good
        parameter.data, parameter.grad = torch.empty(0), None


class Reduces(nn.Module):
    """Tensor parallelism in small: what a block returns is summed over all processes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(blocks(1) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = x + all_reduce(block(x), "sum", torch.distributed.group.WORLD)
        return x


def test_communication_is_never_repeated(cache, monkeypatch):
    """Nor run alone, to be measured."""
    estimated = []
    monkeypatch.setattr(profile, "estimate", lambda node, rates: estimated.append(str(node)) or estimate(node, rates))
    model, x = Reduces(), torch.randn(512, 16)
    plain = copy.deepcopy(model)
    fraction = tight(model, x, 0.4, cache, 0.02)
    recoup.optimize(model, budget=fraction, cache=cache, **QUICK)
    for each in (model, plain):
        torch.manual_seed(1)
        each(x).square().mean().backward()
    assert_same(state(model), state(plain))
    plan = recoup.plans(model)[0]
    talks = [op.id for op in plan.graph.ops if "c10d" in op.name]
    steps = plan.schedule.steps()
    assert len(talks) >= 6
    assert any("all_reduce" in name for name in estimated)
    assert all(steps.count(op) == 1 for op in talks)
    assert repeats(model) > 0


def test_communication_is_not_tried_out(cache):
    model = recoup.optimize(Reduces(), budget=1.0, cache=cache, **{**QUICK, "compile": "inductor"})
    with pytest.raises(recoup.CaptureError, match="use compile='eager'"):
        model(torch.randn(512, 16))
