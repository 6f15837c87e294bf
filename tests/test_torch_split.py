"""Any feasible schedule of any step, run as two halves, gives the gradients of the unplanned step to the last bit.

That is AOTAutograd's own split: where three gradients meet, autograd may add them up in another order than its graph.
"""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional

import recoup
from recoup.torch.costs import Cost
from recoup.torch.internals.graphs import compile_joint
from recoup.torch.internals.operators import plain_operators
from recoup.torch.joint import read_joint
from recoup.torch.rewrite import order_products, split_convolutions
from recoup.torch.rng import EAGER
from recoup.torch.split import split
from recoup.torch.step import step_graph
from tests.torch_helpers import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")

METHODS = (
    "optimal",
    "min-memory",
    "checkpoint-all",
    "recompute-forward",
    "linearized-sqrt",
    "linearized-greedy",
    "chen-sqrt",
    "ap-sqrt",
)
SIZE = 6


def chunks(x, y):
    first, second = x.chunk(2, dim=1)
    return torch.cat([second * y[:, : second.shape[1]], first], dim=1)


def split_sizes(x, y):
    parts = x.split([1, 2, SIZE - 3], dim=0)
    return torch.cat([parts[2].sin(), parts[0], parts[1] * 2]) + y


def normalized(x, y):
    variance, mean = torch.var_mean(x, dim=1, keepdim=True)
    return (x - mean) * (variance + 1).rsqrt() * y


def batch_norm(x, y):
    return functional.batch_norm(x, None, None, y[0], y[1], training=True)


def largest(x, y):
    values, indices = x.topk(2, dim=1)
    return y.scatter_add(1, indices, values)


def overwritten(x, y):
    z = x.clone()
    z[0] = y[1]
    z.mul_(2).tanh_()
    return z


OPS = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "matmul": lambda x, y: x @ y * 0.3,
    "sin": lambda x, _: x.sin(),
    "gelu": lambda x, _: functional.gelu(x),
    "transpose": lambda x, _: x.t(),
    "view": lambda x, _: x.reshape(-1)[: SIZE * SIZE].view(SIZE, SIZE).flip(0),
    "expand": lambda x, y: x[:1].expand(SIZE, SIZE) * y,
    "dropout": lambda x, _: functional.dropout(x, 0.4),
    "no dropout": lambda x, _: functional.dropout(x, 0.0),
    "random": lambda x, _: x * torch.rand(SIZE),
    "softmax": lambda x, y: (x - y).masked_fill(torch.ones(SIZE, SIZE).triu(1).bool(), -torch.inf).softmax(-1),
    "chunk": chunks,
    "split": split_sizes,
    "var_mean": normalized,
    "batch_norm": batch_norm,
    "topk": largest,
    "in place": overwritten,
    "conv": lambda x, y: functional.conv2d(x[None, None], y[None, None, :3, :3], padding=1)[0, 0],
    "detach": lambda x, y: x.detach() * y,
}

programs = st.lists(
    st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=9
)


def function_of(program, outputs):
    """The program as a function of tensors; each line reads two of the newest six values."""

    def function(*tensors):
        values = list(tensors)
        for name, first, second in program:
            recent = values[-6:]
            values.append(OPS[name](recent[first % len(recent)], recent[second % len(recent)]))
        return (*values[-outputs:], sum(values))  # every value is used: Dynamo leaves out what is not

    return function


def joint_step(function, inputs, choose, seen, nearly=False):
    """The function through AOTAutograd, split by the schedule that ``choose`` takes for its graph."""

    def partition(traced, count):
        split_convolutions(traced, nearly)
        order_products(traced)
        traced.graph.lint()
        joint = read_joint(traced, count)
        graph = step_graph(joint, {op.id: Cost(1.0) for op in joint.ops}, torch.device("cpu"), 0)
        steps = choose(graph)
        seen.append((len(steps), len(graph.ops)))
        return split(joint, steps, EAGER)

    captured = []

    def backend(module, args):
        captured.append(compile_joint(module, args, partition))
        return captured[-1]

    return torch.compile(function, backend=backend, fullgraph=True)(*inputs)


def unplanned_step(function, inputs):
    """The function through AOTAutograd with its own split, of the operators that are planned."""
    torch._dynamo.reset()
    with plain_operators(for_gpu=False):
        return torch.compile(function, backend="aot_eager", fullgraph=True)(*inputs)


def gradients(outputs, inputs):
    """Of a loss in which every output has its own weight."""
    wanted = [output for output in outputs if output.requires_grad]
    if not wanted:
        return []
    loss = sum((index + 1) * (output * output.detach().cos()).sum() for index, output in enumerate(wanted))
    return list(torch.autograd.grad(loss, inputs, allow_unused=True))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(programs, st.integers(1, 3), st.sampled_from(METHODS), st.floats(0, 1), st.integers(0, 1000))
def test_every_schedule_gives_the_same_gradients(program, outputs, method, share, seed):
    torch._dynamo.reset()
    function = function_of(program, outputs)
    torch.manual_seed(seed)
    inputs = [torch.randn(SIZE, SIZE, requires_grad=True) for _ in range(3)]

    def choose(graph):
        plain = recoup.simulate(graph, recoup.Schedule.default(graph)).peak_bytes
        smallest = recoup.solve(graph, None, "min-memory", time_limit=0.2).peak_bytes
        budget = int(smallest + share * (plain - smallest))
        found = recoup.solve(graph, budget, method, time_limit=0.3, gap=0.1).schedule
        schedule = recoup.solve(graph, None, "min-memory", time_limit=0.2).schedule if found is None else found
        return [str(step) for step in schedule.steps()]

    results = []
    for planned in (False, True):
        torch.manual_seed(seed + 1)
        seen = []
        outputs_now = joint_step(function, inputs, choose, seen) if planned else unplanned_step(function, inputs)
        found = gradients(outputs_now, inputs)
        results.append((list(outputs_now), found, torch.get_rng_state()))
    assert_same(results[1], results[0], f"{program} {method}")


@pytest.mark.parametrize("seed", range(4))
def test_schedules_with_every_op_repeated_at_random(seed):
    """Not only what planners choose: any valid schedule, with ops run again whenever their inputs are there."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    program = [(draw.choice(sorted(OPS)), draw.randrange(6), draw.randrange(6)) for _ in range(8)]
    function = function_of(program, 2)
    inputs = [torch.randn(SIZE, SIZE, requires_grad=True) for _ in range(3)]

    def choose(graph):
        steps = []
        for op in graph.ops:
            steps.append(op.id)
            earlier = [other.id for other in graph.ops if other.id in steps and not other.once]
            for again in draw.sample(earlier, min(len(earlier), draw.randrange(3))):
                steps.append(again)
        try:
            recoup.simulate(graph, recoup.Schedule.of(graph, steps))
        except recoup.ScheduleError:
            return [op.id for op in graph.ops]
        return steps

    results, seen = [], []
    for planned in (False, True):
        torch.manual_seed(seed)
        outputs = joint_step(function, inputs, choose, seen) if planned else unplanned_step(function, inputs)
        results.append((list(outputs), gradients(outputs, inputs), torch.get_rng_state()))
    assert_same(results[1], results[0], f"{program}")
    assert not seen or seen[0][0] > seen[0][1]


@pytest.mark.parametrize(
    ("inner", "bias", "order"),
    [(64, False, ["input", "weight"]), (4, False, ["weight", "input"]), (4, True, ["weight", "input"])],
    ids=["vocabulary", "layer", "with bias"],
)
def test_products_of_a_backward_in_the_order_that_holds_less(inner, bias, order):
    """The weight's cast goes before the weight's gradient comes, if they are large; else the layer's input does."""
    tokens, width = 48, 8
    x = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(inner, width, requires_grad=True)
    shift = torch.randn(inner, requires_grad=True) if bias else None
    sizes = {"input": 2 * tokens * width, "weight": 2 * inner * width}
    found = []

    def function(x, weight, *shift):
        lower = [one.bfloat16() for one in (x.sin(), weight, *shift)]
        return functional.linear(*lower).float().logsumexp(1).sum()

    def choose(graph):
        bytes_ = {value.id: value.bytes for value in graph.values}
        products = [op for op in graph.ops if op.id.startswith("mm")]
        found.extend(bytes_[op.outputs[0]] for op in products[-2:])
        return [op.id for op in graph.ops]

    torch._dynamo.reset()
    inputs = [x, weight] if shift is None else [x, weight, shift]
    joint_step(function, inputs, choose, []).backward()
    assert found == [sizes[name] for name in order]


def convolution(transposed, dims, groups, step, more, dilation, bias, layout, part, seed):
    """A step with one convolution, whose result may be a part of another one, and what it is given."""
    torch.manual_seed(seed)
    name = f"conv{'_transpose' if transposed else ''}{dims}d"
    x = torch.randn(4, 16, *[7 + dim for dim in range(dims)])
    sizes = (16, 24 // groups) if transposed else (24, 16 // groups)
    kernel = torch.randn(*sizes, *[3] * dims)
    if layout == "channels last" and dims == 2:
        x, kernel = (one.contiguous(memory_format=torch.channels_last) for one in (x, kernel))
    shift = [torch.randn(24)] if bias else []
    options = {"stride": step, "padding": 1, "dilation": dilation, "groups": groups}
    if transposed:
        options["output_padding"] = min(more, step - 1)
    function = getattr(functional, name)

    def step_of(x, kernel, *shift):
        made = function(x.sin(), kernel, *shift, **options)
        made = torch.cat([torch.ones_like(made), made], dim=1) if part else made
        return (made.sigmoid(),)

    return step_of, [one.requires_grad_() for one in (x, kernel, *shift)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 3),
    st.integers(0, 1),
    st.integers(1, 2),
    st.booleans(),
    st.sampled_from(["plain", "channels last"]),
    st.booleans(),
    st.integers(0, 100),
)
def test_convolutions_of_all_kinds_have_their_gradients(
    transposed, dims, groups, step, more, dilation, bias, how, part, seed
):
    """To the last bit with the kernels that PyTorch has, nearly where the input's gradient is a convolution back."""
    function, inputs = convolution(transposed, dims, groups, step, more, dilation, bias, how, part, seed)
    results = []
    for nearly in (None, False, True):
        torch._dynamo.reset()
        if nearly is None:
            outputs = unplanned_step(function, inputs)
        else:
            outputs = joint_step(function, inputs, lambda graph: [op.id for op in graph.ops], [], nearly)
        results.append((list(outputs), gradients(outputs, inputs)))
    assert_same(results[1], results[0], f"{dims}d, transposed: {transposed}")
    for mine, theirs in zip(results[2][1], results[0][1], strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.stride() == theirs.stride()


def test_a_convolution_of_nothing():
    """Its output has no width, which PyTorch's choice of a kernel does not take."""

    def function(x, kernel):
        return (functional.conv_transpose2d(x, kernel, padding=(0, 1)).sigmoid() + kernel.sum(),)

    inputs = [torch.randn(4, 4, 5, 1, requires_grad=True), torch.randn(4, 4, 2, 2, requires_grad=True)]
    torch._dynamo.reset()
    outputs = joint_step(function, inputs, lambda graph: [op.id for op in graph.ops], [], nearly=True)
    assert outputs[0].shape == (4, 4, 6, 0)
    assert [tuple(one.shape) for one in gradients(outputs, inputs)] == [(4, 4, 5, 1), (4, 4, 2, 2)]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("transposed", [False, True], ids=["convolution", "transposed"])
def test_a_convolutions_input_is_not_kept_for_its_shape(transposed, frozen):
    """The gradient of the input reads the weight and the gradient of the output alone."""
    function, inputs = convolution(transposed, 2, 1, 2, 0, 1, False, "plain", False, 0)
    inputs[1].requires_grad_(not frozen)
    reads = {}

    def choose(graph):
        for op in graph.ops:
            if "convolution" in op.id:
                reads[op.id] = [name for name in op.inputs if name == "sin"]
        return [op.id for op in graph.ops]

    torch._dynamo.reset()
    gradients(joint_step(function, inputs, choose, [], nearly=True), inputs[: 1 if frozen else 2])
    read = list(reads.values())
    assert read == [["sin"], []] if frozen else read == [["sin"], ["sin"], []]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("layout", ["plain", "channels last"])
def test_a_part_of_a_gradient_is_copied_once_for_both_kernels(layout, bias):
    """Each would copy it for itself; a bias's gradient is summed up where it lies, as without a plan."""
    function, inputs = convolution(True, 2, 1, 2, 0, 1, bias, layout, True, 0)
    reads = []

    def choose(graph):
        reads.extend(name for op in graph.ops[1:] if "convolution" in op.id for name in op.inputs if "clone" in name)
        return [op.id for op in graph.ops]

    torch._dynamo.reset()
    found = gradients(joint_step(function, inputs, choose, [], nearly=True), inputs)
    assert len(reads) == (0 if bias else 2)
    assert len(set(reads)) == (0 if bias else 1)
    for mine, theirs in zip(found, gradients(unplanned_step(function, inputs), inputs), strict=True):
        torch.testing.assert_close(mine, theirs)
