"""Small models and data shared by the tests of low-precision training."""

import pytest
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.gate = nn.Linear(width, 2, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x))) * self.gate(x).softmax(-1)[..., :1]


class Tiny(nn.Module):
    """Residual blocks with a router, an embedding and a tied head."""

    def __init__(self, width: int = 64, blocks: int = 3, vocabulary: int = 50, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = nn.Linear(width, vocabulary, bias=False)
        self.out.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            if self.recompute:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return self.out(x)


@pytest.fixture
def tiny():
    """A maker of equal `Tiny` models."""

    def make(**kwargs):
        torch.manual_seed(0)
        return Tiny(**kwargs)

    return make


@pytest.fixture
def ids():
    return torch.randint(50, (3, 21), generator=torch.Generator().manual_seed(1))
