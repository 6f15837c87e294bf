"""GPT-2 (Radford et al., 2019): a pre-norm decoder with learned positions and GELU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from recoup.torch.models.common import BlockModel, logits_or_loss, normal_init


class Decoder(nn.Module):
    """One pre-norm layer: causal attention, then a perceptron of four times the width, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, tokens, width) to the same shape."""
        qkv: Tensor = self.qkv(self.norm1(x))
        query, key, value = qkv.view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        dropout = self.attention_dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + self.dropout(self.project(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(BlockModel):
    """GPT-2 small unless told otherwise, for up to ``length`` tokens."""

    def __init__(
        self,
        vocabulary: int = 50257,
        length: int = 1024,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        dropout: float = 0.1,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Decoder(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        normal_init(self)

    def blocks(self) -> list[nn.Module]:
        """The decoder layers."""
        return list(self.layers)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits of shape (batch, tokens, vocabulary), or the mean loss when targets are given."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embed(tokens) + self.positions(positions))
        for layer in self.layers:
            x = layer(x)
        return logits_or_loss(self.head(self.norm(x)), targets)
