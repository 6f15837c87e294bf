"""A small real task, trained with a third of the memory: the same loss curve to the last bit."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import recoup
from recoup.torch.memory import measure_peak
from tests.torch_helpers import QUICK, assert_same, repeats, state

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, BATCH, SIDE = 30, 32, 24


def shapes(count):
    """Images of a bar, a cross, a ring or a disk somewhere, under noise; the class is which."""
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    classes = torch.randint(4, (count,))
    centre = torch.randint(8, SIDE - 8, (count, 2))
    down, across = rows[None] - centre[:, 0, None, None], columns[None] - centre[:, 1, None, None]
    radius = (down**2 + across**2).float().sqrt()
    bar = (down.abs() <= 1) & (across.abs() <= 6)
    cross = bar | ((across.abs() <= 1) & (down.abs() <= 6))
    drawn = torch.stack([bar, cross, (radius - 5).abs() <= 1, radius <= 5])
    picture = drawn[classes, torch.arange(count)].float()
    return (picture + 0.3 * torch.randn_like(picture))[:, None], classes


def block(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


def classifier(width=8):
    return nn.Sequential(
        *(block(1, width), *(block(width, width) for _ in range(9)), nn.Dropout2d(0.1)),
        *(block(width, 2 * width, 2), block(2 * width, 2 * width), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        *(nn.Dropout(0.1), nn.Linear(2 * width, 4)),
    )


def train(model, images, classes):
    """The loss of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    curve = []
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (BATCH,))
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(images[chosen]), classes[chosen])
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


def test_a_third_of_the_memory_and_the_same_curve(tmp_path):
    torch.manual_seed(0)
    images, classes = shapes(256)
    plain = classifier()
    planned = copy.deepcopy(plain)

    probe = copy.deepcopy(plain)

    def step():
        functional.cross_entropy(probe(images[:BATCH]), classes[:BATCH]).backward()

    peak = measure_peak(step, torch.device("cpu"))
    probe.zero_grad(set_to_none=True)
    recoup.optimize(planned, budget=peak // 3, cache=tmp_path, **QUICK)
    theirs = train(plain, images, classes)
    ours = train(planned, images, classes)
    assert ours == theirs
    assert_same(state(planned), state(plain))
    assert repeats(planned) > 0
    assert all(math.isfinite(loss) for loss in ours)
    assert sum(ours[-5:]) < 0.7 * sum(ours[:5])  # it learns
    planned.zero_grad(set_to_none=True)
    again = measure_peak(
        lambda: functional.cross_entropy(planned(images[:BATCH]), classes[:BATCH]).backward(), torch.device("cpu")
    )
    assert again <= peak // 3
