"""A Llama-style decoder (Touvron et al., 2023): RMSNorm, rotary positions, SwiGLU, grouped-query attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from recoup.torch.models.common import BlockModel, logits_or_loss, normal_init


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + half) of a head's features by its position's angle (Su et al., 2021)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Decoder(nn.Module):
    """One pre-norm layer: causal attention with rotary positions, then a gated perceptron, each added to its input."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1 = nn.RMSNorm(width, eps=1e-5)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.head_width, bias=False)
        self.value = nn.Linear(width, groups * self.head_width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """From (batch, tokens, width) to the same shape; ``cos`` and ``sin`` are (tokens, half a head)."""
        normed = self.norm1(x)
        query = rotate(self._heads(self.query(normed)), cos, sin)
        key = rotate(self._heads(self.key(normed)), cos, sin)
        value = self._heads(self.value(normed))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        out: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return out


class Llama(BlockModel):
    """TinyLlama's 1.1 B unless told otherwise. ``groups`` are the heads that keys and values have."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        vocabulary: int = 32000,
        length: int = 2048,
        layers: int = 22,
        width: int = 2048,
        heads: int = 32,
        groups: int = 4,
        hidden: int = 5632,
        base: float = 10000.0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Decoder(width, heads, groups, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(length), base ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        normal_init(self)

    def blocks(self) -> list[nn.Module]:
        """The decoder layers, called ``layer(x, cos, sin)``."""
        return list(self.layers)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits of shape (batch, tokens, vocabulary), or the mean loss when targets are given."""
        x = self.embed(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return logits_or_loss(self.head(self.norm(x)), targets)
