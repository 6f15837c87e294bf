"""When Inductor's kernels run, and what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx

import recoup
import recoup.torch.split
from recoup.torch import compiled
from recoup.torch.internals import inductor
from tests.test_torch_plans import never
from tests.torch_helpers import COMPILED, repeats

pytestmark = pytest.mark.usefixtures("one_thread", "nothing_compiled", "as_on_cuda")


@pytest.fixture
def as_on_cuda():
    """Not channels last, which Inductor always chooses on a CPU."""
    with inductor_config.patch(layout_optimization=False):
        yield


@pytest.fixture
def halves(monkeypatch):
    """The kernels of every half that is compiled, in the order in which they run."""
    found: list[list[Any]] = []
    in_order = inductor._InOrder.__call__

    def look(self, nodes):
        assert not inductor_config.reorder_for_peak_memory
        found.append(in_order(self, nodes[::-1]))
        assert set(found[-1]) == set(nodes)
        return found[-1]

    monkeypatch.setattr(inductor._InOrder, "__call__", look)
    return found


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


class Adds(nn.Module):
    """A chain of sums."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(x)


def test_what_is_made_again_is_not_fused_across_places(tmp_path, halves):
    """Inductor would make the whole chain again in one kernel, and hold all of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Adds(64) for _ in range(6)))
    recoup.optimize(model, budget=0.75, cache=tmp_path, **COMPILED)
    step(model, torch.randn(512, 64))
    assert repeats(model) > 0
    seen = [inductor._places(node) for half in halves for node in half]
    kept = [places for places in seen if any(place.fixed for place in places)]
    assert len({place.first for places in kept for place in places}) > 1  # there are several places
    for places in kept:  # and no kernel is at two
        assert max(place.first for place in places) <= min(place.last for place in places)


def test_kernels_run_in_the_order_of_the_plan(tmp_path, halves):
    """Inductor would run last what nothing waits for, such as the gradient of a bias, and keep what it sums up."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    recoup.optimize(model, budget=0.8, cache=tmp_path, **COMPILED)
    step(model, torch.randn(512, 64))
    backward = [origin.name for node in halves[-1] for origin in inductor._origins(node)]
    sums, products = ([name for name in backward if name.startswith(kind)] for kind in ("sum", "mm"))
    assert len(sums) == 4
    assert len(products) == 7
    for later, name in enumerate(sums[:-1]):  # each between the products of its layer and those of the next
        assert backward.index(name) < backward.index(products[2 * later + 2])
    assert inductor_config._post_fusion_custom_pass is None  # for others


def test_what_is_made_again_shares_a_kernel_with_the_backward(tmp_path, halves):
    """The input's gradient comes first, then one kernel for the activation and its backward, which read the same."""
    torch.manual_seed(0)
    model = perceptron(tmp_path)
    step(model, torch.randn(512, 64))
    again = [node for node in halves[-1] if any(place.fixed for place in inductor._places(node))]
    large = [[name for name in node.get_buffer_names() if written(node, name) == 512 * 64] for node in again]
    assert [len(names) for names in large] == [2] * repeats(model)


def perceptron(folder: Path) -> nn.Module:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)), nn.Linear(64, 64))
    return recoup.optimize(model, budget=0.75, cache=folder, **COMPILED)


def test_the_order_is_that_of_the_process_before(tmp_path, monkeypatch):
    """Whatever the workspaces are in this one: what was compiled then is found again."""

    def run():
        torch.compiler.reset()
        model = perceptron(tmp_path)
        step(model, torch.randn(512, 64))
        return recoup.plans(model)[0].schedule.steps()

    first = run()
    monkeypatch.setattr(compiled, "bring_together", never)
    assert run() == first


def written(node: Any, name: str) -> int:
    """How many elements this buffer of the node has."""
    return int(node.scheduler.name_to_buf[name].node.get_numel())


def test_the_copy_of_a_weight_waits_until_it_is_read(tmp_path, halves):
    """Inductor lays a convolution's weight out anew; that kernel is of no place in the graph."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GELU()) for _ in range(6)))
    with inductor_config.patch(layout_optimization=True):
        recoup.optimize(model, budget=0.8, cache=tmp_path, **COMPILED)
        step(model, torch.randn(8, 16, 32, 32))
    copies = 0
    for half in halves:
        for index, node in enumerate(half):
            if all(origin.op == "placeholder" for origin in inductor._origins(node)):
                soon = [{dependency.name for dependency in one.unmet_dependencies} for one in half[index + 1 :][:2]]
                assert not set().union(*soon).isdisjoint(node.get_buffer_names())  # the input may be copied, too
                copies += 1
    assert copies >= 6


class Parts(nn.Module):
    """Two convolutions side by side, whose gradients are slices of one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Conv2d(4, 16, 3, padding=1, bias=False) for _ in range(2))
        self.both = nn.Conv2d(32, 4, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.both(torch.cat([self.left(x.sin()), self.right(x.cos())], dim=1))


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_convolutions_kernels_share_the_copy_of_a_gradient(tmp_path, halves, monkeypatch, channels_last):
    """However they are laid out: slices are copied, and what comes from outside, in the layout that is wanted."""
    monkeypatch.setattr(compiled, "PLAIN", 0.0)  # never PyTorch's own split
    model = Parts()
    with inductor_config.patch(layout_optimization=channels_last):
        recoup.optimize(model, budget="1GiB", cache=tmp_path, **COMPILED)
        step(model, torch.randn(8, 4, 32, 32, requires_grad=True))
    reads: dict[str, set[str]] = {}
    for node in halves[-1]:
        [name, *others] = [origin.name for origin in inductor._origins(node)]
        if name.startswith("convolution") and not others:
            reads.setdefault(name, set()).update(dependency.name for dependency in node.read_writes.reads)
    for kernel in ("", "_1", "_2"):
        weight = reads[f"convolution_backward_default{kernel}"]
        assert len(weight & reads[f"convolution_default{kernel}"]) == 2  # the gradient and the weight


def convs(inputs: int, outputs: int) -> nn.Sequential:
    def one(given: int) -> list[nn.Module]:
        return [nn.Conv2d(given, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(*one(inputs), *one(outputs))


class Skips(nn.Module):
    """A small U-Net: what it concatenates is read elsewhere, too, and the gradient of a bias sums up a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom, self.after = convs(3, 8), convs(8, 16), convs(16, 8)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        inside = self.bottom(nn.functional.avg_pool2d(skip, 2))
        return self.after(torch.cat([skip, self.up(inside)], dim=1))


class Tied(nn.Module):
    """A small language model whose vocabulary is used twice: two gradients that are added up, one of them early."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inside = nn.Embedding(500, 32), nn.Sequential(*(Adds(32) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.inside(self.words(x)) @ self.words.weight.T, x)


class Twice(nn.Module):
    """A weight that is used twice: the gradient that is made last goes to the sum at once."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.inside = nn.Linear(64, 64), nn.Sequential(*(Adds(64) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.inside(self.shared(x)))


class Views(Adds):
    """A sum that several read, through a view of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + nn.functional.dropout(self.inside(x), 0.1)
        return y.flatten(0, 1) if y.dim() == 3 else y.unflatten(0, (64, -1))


class Viewed(nn.Sequential):
    """A chain of them, with more and more to add up where none is written down."""

    def __init__(self) -> None:
        super().__init__(*(Views(64) for _ in range(6)))


@pytest.mark.parametrize(
    ("kind", "share", "off"),
    [(Skips, 0.6, 0.001), (Skips, 0.75, 0.001), (Tied, 0.7, 0.01), (Twice, 0.7, 0.001), (Viewed, 0.7, 0.01)],
)
def test_the_first_prediction_is_right(tmp_path, monkeypatch, kind, share, off):
    torch.manual_seed(0)
    inputs = {
        Skips: torch.randn(8, 3, 96, 96),
        Tied: torch.randint(500, (2048,)),
        Twice: torch.randn(2048, 64),
        Viewed: torch.randn(64, 32, 64),
    }
    model, x = kind(), inputs[kind]
    tried: list[compiled._Tried] = []
    try_out = compiled._try_out

    def remember(*args):
        tried.append(try_out(*args))
        return tried[-1]

    monkeypatch.setattr(compiled, "_try_out", remember)
    recoup.optimize(model, budget=share, cache=tmp_path, **COMPILED)
    step(model, x)
    assert repeats(model) > 0
    assert tried[0].peak_bytes == pytest.approx(tried[0].step.plan.peak_bytes, rel=off)


def test_a_product_stays_where_it_is():
    """Of a late product and an early one Inductor may make one call of the late one and the sum."""

    def function(a, b, c):
        early, late = a @ b, b @ c
        return early + late, late + early, early + c, late + c, torch.add(early, c, alpha=2)

    graph = make_fx(function, tracing_mode="fake")(*(torch.randn(4, 4) for _ in range(3))).graph
    early, late = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    sums = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    inductor.keep_place(early, 0, own_kernel=True)
    inductor.keep_place(late, 4, own_kernel=True)
    for each in sums:
        inductor.keep_place(each, 5)
    inductor._keep_products(graph)
    (copy,) = graph.find_nodes(op="call_function", target=torch.ops.aten.maximum.default)
    assert copy.args == (early, early)
    assert [each.args[0] for each in sums] == [early, early, copy, late, early]
    assert [each.args[1] for each in sums[:2]] == [late, late]


def test_what_a_refused_budget_names_is_called_a_prediction(tmp_path):
    model = recoup.optimize(Adds(64), budget="1KiB", cache=tmp_path, **COMPILED)
    with pytest.raises(recoup.BudgetError, match=r"works.*; these are predictions, which a compiled step may exceed"):
        step(model, torch.randn(512, 64))


class SumsUp(torch.autograd.Function):
    """Makes something in the forward that only the backward reads."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.cumsum(0))
        return x.cos()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


def test_what_only_the_backward_reads_is_made_when_it_does(tmp_path):
    torch.manual_seed(0)
    before, after = nn.Linear(64, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    function, x = lambda x: after(SumsUp.apply(before(x))), torch.randn(512, 64)
    graph = recoup.plan(function, (x,), budget=1.0, cache=tmp_path, **COMPILED).graph
    made = graph.op_index["cumsum"]
    reader = min(index for index, op in enumerate(graph.ops) if not set(graph.ops[made].outputs).isdisjoint(op.inputs))
    assert reader == made + 1
    assert made > graph.op_index["tangents"] + 1


def test_halves_that_were_compiled_are_found_again(tmp_path, monkeypatch):
    """Unless the same is to run at other places, which is not in the graphs that Inductor is given."""
    keep = inductor.keep_place

    def run(more: int) -> tuple[int, int]:
        monkeypatch.setattr(recoup.torch.split, "keep_place", lambda node, at, **how: keep(node, at + more, **how))
        counters.clear()
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
        recoup.optimize(model, budget=0.8, cache=tmp_path / "plans", **COMPILED)
        step(model, torch.randn(512, 64))
        assert repeats(model) > 0
        return counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]

    with fresh_cache(dir=tmp_path), inductor_config.patch(force_disable_caches=False, fx_graph_cache=True):
        found = [run(0), run(0), run(1)]
    assert [(hits > 0, misses > 0) for hits, misses in found] == [(False, True), (True, False), (False, True)]
