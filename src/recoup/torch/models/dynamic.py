"""Models whose control flow depends on their data: what no tracer captures, and DTR is for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Tree:
    """A leaf has a token, any other node two children."""

    token: int = 0
    children: tuple[Tree, ...] = ()

    @staticmethod
    def random(leaves: int, vocabulary: int, seed: int) -> Tree:
        """A binary tree with this many leaves, split anywhere."""
        return _random_tree(leaves, vocabulary, random.Random(seed))


def _random_tree(leaves: int, vocabulary: int, chance: random.Random) -> Tree:
    if leaves == 1:
        return Tree(chance.randrange(vocabulary))
    left = chance.randint(1, leaves - 1)
    return Tree(0, (_random_tree(left, vocabulary, chance), _random_tree(leaves - left, vocabulary, chance)))


class TreeLSTM(nn.Module):
    """A binary tree-structured LSTM (Tai et al., 2015). With ``rows``, a tree stands for so many sentences that have
    one parse; their tokens follow those of the tree."""

    def __init__(self, vocabulary: int = 50, width: int = 32, classes: int = 5, rows: int = 1) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.rows = rows
        self.embedding = nn.Embedding(vocabulary, width)
        self.leaf = nn.Linear(width, 3 * width)
        self.node = nn.Linear(2 * width, 5 * width)
        self.head = nn.Linear(width, classes)

    def forward(self, trees: Sequence[Tree]) -> Tensor:
        """Logits, one row for each sentence."""
        return self.head(torch.cat([self._visit(tree)[0] for tree in trees]))

    def _visit(self, tree: Tree) -> tuple[Tensor, Tensor]:
        if not tree.children:
            tokens = torch.arange(tree.token, tree.token + self.rows, device=self.head.weight.device) % self.vocabulary
            i, o, u = self.leaf(self.embedding(tokens)).chunk(3, 1)
            c = torch.sigmoid(i) * torch.tanh(u)
            return torch.sigmoid(o) * torch.tanh(c), c
        (left, left_c), (right, right_c) = (self._visit(child) for child in tree.children)
        i, o, u, f, g = self.node(torch.cat([left, right], 1)).chunk(5, 1)
        c = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(f) * left_c + torch.sigmoid(g) * right_c
        return torch.sigmoid(o) * torch.tanh(c), c


class Recursive(nn.Module):
    """Applies one block to its own output until the data says stop: depth by value, as in adaptive computation."""

    def __init__(self, width: int = 32, most: int = 12) -> None:
        super().__init__()
        self.most = most
        self.block = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(inplace=True), nn.Linear(2 * width, width))
        self.halt = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """At least one round, at most ``most``."""
        for _ in range(self.most):
            x = x + self.block(x)
            if torch.sigmoid(self.halt(x)).mean().item() > 0.7:
                break
        return x


class Routed(nn.Module):
    """A mixture of experts with an early exit: each row goes to one expert, and easy batches leave half-way."""

    def __init__(self, width: int = 32, experts: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(layers))
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                          for _ in range(experts))
            for _ in range(layers)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Rows are moved to their experts and back by index."""
        for depth, (gate, experts) in enumerate(zip(self.gates, self.experts, strict=True)):
            weights = functional.softmax(gate(x), dim=1)
            chosen = weights.argmax(dim=1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(experts.children()):
                rows = (chosen == number).nonzero().squeeze(1)
                if rows.numel():
                    out = out.index_copy(0, rows, expert(x[rows]) * weights[rows, number].unsqueeze(1))
            x = x + out
            if depth >= 1 and x.detach().abs().mean().item() < 0.05:
                break
        return x


class UnrolledGAN(nn.Module):
    """The generator's loss through several steps of the discriminator's own training (Metz et al., 2017)."""

    def __init__(self, width: int = 16, steps: int = 5, rate: float = 0.1) -> None:
        super().__init__()
        self.steps = steps
        self.rate = rate
        self.generator = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.first = nn.Parameter(torch.randn(width, 2 * width) / width)
        self.second = nn.Parameter(torch.randn(2 * width, 1) / width)

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        """A scalar; its gradient goes through every inner update."""
        fake = self.generator(noise)
        first: Tensor = self.first
        second: Tensor = self.second
        for _ in range(self.steps):
            inner = _score(real, first, second).neg().mean() + _score(fake, first, second).mean()
            grads = torch.autograd.grad(inner, (first, second), create_graph=True)
            first, second = first - self.rate * grads[0], second - self.rate * grads[1]
        return _score(fake, first, second).neg().mean()


def _score(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return functional.softplus(torch.tanh(x @ first) @ second)
