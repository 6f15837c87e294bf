"""An LSTM language model (Zaremba et al., 2014), its cells in a Python loop over time: a graph as long as the text."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recoup.torch.models.common import BlockModel, logits_or_loss


class Cell(nn.Module):
    """An LSTM cell that takes its state as two tensors, so that it can be checkpointed as it stands."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The next hidden state and memory; dropout is on what comes from below only, never through time."""
        state: tuple[Tensor, Tensor] = self.cell(self.dropout(x), (hidden, memory))
        return state


class LSTM(BlockModel):
    """The paper's large model unless told otherwise."""

    def __init__(self, vocabulary: int = 10000, layers: int = 2, width: int = 1500, dropout: float = 0.65) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.cells = nn.ModuleList(Cell(width, dropout) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)

    def blocks(self) -> list[nn.Module]:
        """The cells, one a layer, each called once a token and returning two tensors."""
        return list(self.cells)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits of shape (batch, tokens, vocabulary), or the mean loss when targets are given."""
        embedded: Tensor = self.embed(tokens)
        zeros = torch.zeros_like(embedded[:, 0])
        states = [(zeros, zeros) for _ in self.cells]
        tops: list[Tensor] = []
        for x in embedded.unbind(1):
            for i, cell in enumerate(self.cells):
                states[i] = cell(x, *states[i])
                x = states[i][0]
            tops.append(x)
        return logits_or_loss(self.head(self.dropout(torch.stack(tops, dim=1))), targets)
