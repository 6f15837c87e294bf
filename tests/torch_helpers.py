"""What the torch tests share: a plain and a planned twin, trained alike and compared to the last bit; small models."""

import copy
import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import recoup

QUICK: dict[str, Any] = {"time_limit": 0.4, "gap": 0.05, "compile": "eager"}
COMPILED = {**QUICK, "compile": "inductor"}


def tight(target: Callable[..., Any], inputs: Any, share: float, cache: Path | bool, slack: float = 0.0) -> float:
    """The budget, as a fraction, that lies ``share`` of the way from the smallest feasible one to the plain peak."""
    keep_all = {**QUICK, "planner": "checkpoint-all"}
    graph = recoup.plan(target, inputs, 1.0, cache=cache, **keep_all).graph
    plain = recoup.simulate(graph, recoup.Schedule.default(graph)).peak_bytes
    smallest = recoup.solve(graph, None, "min-memory", time_limit=2).peak_bytes  # a fifth of a second, if not busy
    assert smallest is not None
    return min(1.0, (smallest + share * (plain - smallest)) / plain + slack)


def repeats(target: Any) -> int:
    """How many more ops than the plain step the plans in use run."""
    return sum(len(plan.schedule) - len(plan.graph.ops) for plan in recoup.plans(target))


@dataclass
class Trainer:
    """A model, its optimizer and its loss; every step notes all that a user could see."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any], torch.Tensor]
    autocast: bool = False

    def step(self, *batches: Any, seed: int) -> dict[str, Any]:
        """One optimizer step over the batches (several accumulate), from this seed."""
        torch.manual_seed(seed)
        self.optimizer.zero_grad(set_to_none=True)
        seen: dict[str, Any] = {}
        for number, inputs in enumerate(batches):
            context = torch.autocast("cpu", dtype=torch.bfloat16) if self.autocast else nullcontext()
            with context:
                loss = self.loss(call(self.model, inputs))
            loss.backward()
            seen[f"loss {number}"] = digest(loss)
            del loss
        seen |= state(self.model)
        self.optimizer.step()
        return seen


def call(target: Callable[..., Any], inputs: Any) -> Any:
    """As :func:`recoup.plan` reads inputs."""
    return target(**inputs) if isinstance(inputs, dict) else target(*inputs)


def state(model: nn.Module) -> dict[str, str | None]:
    """Digests of every parameter, gradient and buffer, and of the generator's state; they keep no memory."""
    seen: dict[str, str | None] = {"rng": digest(torch.get_rng_state())}
    for name, parameter in model.named_parameters():
        seen[name] = digest(parameter)
        seen[f"grad {name}"] = None if parameter.grad is None else digest(parameter.grad)
    for name, buffer in model.named_buffers():
        seen[f"buffer {name}"] = digest(buffer)
    return seen


def digest(tensor: torch.Tensor) -> str:
    """The same for two tensors of one type, shape and content, to the last bit."""
    content = hashlib.sha256(bits(tensor).numpy().tobytes()).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)} {content}"


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Equal to the last bit (NaNs too), of the same type, strides aside."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor), where
        assert ours.dtype == theirs.dtype, where
        assert ours.shape == theirs.shape, where
        assert torch.equal(bits(ours), bits(theirs)), f"{where}: differs"
    elif isinstance(theirs, dict):
        assert type(ours) is type(theirs), where
        assert list(ours) == list(theirs), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where} {key}")
    elif isinstance(theirs, list | tuple):
        assert type(ours) is type(theirs), where
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f"{where} [{index}]")
    else:
        assert ours == theirs, where


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as bytes: 0.0 is not -0.0, and a NaN is itself."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def total(outputs: Any) -> torch.Tensor:
    """A loss that every differentiable tensor in the outputs enters with its own weight."""
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return sum((index + 1) * leaf.square().sum() for index, leaf in enumerate(leaves) if leaf.requires_grad)


def check(model, inputs, cache, *, share=0.3, steps=3, budget=None, loss=total, recomputes=True):
    """Train ``model`` and a copy alike, the copy planned, and compare all there is; returns the planned one."""
    planned = copy.deepcopy(model)
    fraction = tight(planned, inputs, share, cache, slack=0.02) if budget is None else budget
    assert recoup.optimize(planned, budget=fraction, cache=cache, **QUICK) is planned
    for step in range(steps):
        results = []
        for each in (model, planned):
            mine = copy.deepcopy(inputs)
            torch.manual_seed(step)
            each.zero_grad(set_to_none=True)
            outputs = call(each, mine)
            value = loss(outputs)
            value.backward()
            results.append((outputs, value, mine, state(each)))
            with torch.no_grad():
                for parameter in each.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.01 * parameter.grad)
        for name, theirs, ours in zip(("outputs", "loss", "inputs", "state"), *results, strict=True):
            assert_same(ours, theirs, f"step {step} {name}")
        del results, outputs, value, mine, theirs, ours
    if recomputes:
        assert repeats(planned) > 0
    return planned


def net(*, width=8, dropout=0.0, norm=False):
    """A small convolutional net whose activations outweigh its parameters."""
    layers: list[nn.Module] = []
    for inputs in (3, width, width):
        layers += [nn.Conv2d(inputs, width, 3, padding=1)]
        layers += [nn.BatchNorm2d(width)] if norm else []
        layers += [nn.ReLU(inplace=True)]
        layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))


def blocks(count: int = 2) -> nn.Sequential:
    """Blocks of linear layers with batch norm and dropout, which compile quickly."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
        for _ in range(count)
    ]
    return nn.Sequential(*layers)


def run(model, x, steps: int = 2) -> list[float]:
    """Forwards and backwards without an optimizer, each from a seed of its own, and their losses."""
    losses = []
    for seed in range(steps):
        torch.manual_seed(seed)
        model.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def images(batch=4, side=16):
    return torch.randn(batch, 3, side, side)


class Wrapped(nn.Module):
    """A forward that is not PyTorch's own, as most models have."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x)


def well_conditioned(model: nn.Module) -> nn.Module:
    """Small and untrained, these networks have channels that hardly vary. Batch norm amplifies their rounding and hands
    them to ReLU at its kink, where the sign of that rounding decides: after three steps the gradients of the plain step
    in float32 are off by their norm (ResNet-50, MobileNet), and comparing would say nothing. With a larger eps and
    biases other than zero they are within 1e-4 of float64's."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 0.1
            nn.init.normal_(module.bias, std=0.5)
    return model
