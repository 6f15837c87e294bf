"""Vision Transformer (Dosovitskiy et al., 2021): an encoder over image patches and a class token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from recoup.torch.models.common import BlockModel


class Encoder(nn.Module):
    """One pre-norm layer: attention over all patches, then a perceptron, each added to its input."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, patches, width) to the same shape."""
        qkv: Tensor = self.qkv(self.norm1(x))
        query, key, value = qkv.view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.dropout(self.project(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class ViT(BlockModel):
    """ViT-B/16 unless told otherwise, for square images of ``image`` pixels."""

    def __init__(
        self,
        image: int = 224,
        patch: int = 16,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        hidden: int = 3072,
        classes: int = 1000,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (image // patch) ** 2 + 1, width))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Encoder(width, heads, hidden, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        nn.init.normal_(self.positions, std=0.02)

    def blocks(self) -> list[nn.Module]:
        """The encoder layers."""
        return list(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes), read off the class token."""
        patches: Tensor = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(patches.shape[0], -1, -1), patches], dim=1)
        x = self.dropout(x + self.positions)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits
