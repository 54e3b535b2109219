"""Tables of numbers."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.suite.families.blocks import mlp
from benchmarks.suite.family import Family, of_torch

KIND = "tabular"
_ROWS, _FEATURES = 256, 24


class _FeatureTokens(nn.Module):
    """Each number as a token of its own, and one for the class; (B, F) → (B, F + 1, C)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(_FEATURES, channels) * 0.2)
        self.bias = nn.Parameter(torch.zeros(_FEATURES, channels))
        self.cls = nn.Parameter(torch.randn(1, 1, channels))

    def forward(self, x: Tensor) -> Tensor:
        made = x[..., None] * self.weight + self.bias
        return torch.cat((self.cls.expand(x.shape[0], -1, -1), made), 1)


class _GatedBlock(nn.Module):
    """A block of FT-Transformer: attention, then an MLP gated by reglu; (B, T, C)."""

    def __init__(self, channels: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.q, self.k, self.v = (nn.Linear(channels, channels) for _ in range(3))
        self.out = nn.Linear(channels, channels)
        self.enter, self.leave = nn.Linear(channels, 2 * hidden), nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_attention(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        a, gate = self.enter(self.norm_mlp(x)).chunk(2, -1)
        return x + self.leave(a * torch.relu(gate))


class _FtTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = _FeatureTokens(96)
        self.blocks = nn.Sequential(*(_GatedBlock(96, 8, 128) for _ in range(2)))
        self.head = nn.Sequential(nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(x))[:, 0])


class _TabNet(nn.Module):
    """TabNet's decision steps: masks of features, and gated layers; (B, F) → (B, 8)."""

    def __init__(self, steps: int, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(_FEATURES)
        self.shared = nn.Linear(_FEATURES, 4 * width)
        self.layers = nn.ModuleList(nn.Linear(2 * width, 4 * width) for _ in range(steps))
        self.masks = nn.ModuleList(nn.Linear(width, _FEATURES) for _ in range(steps))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        prior, mask = torch.ones_like(x), torch.ones_like(x)
        found = x.new_zeros(())
        for layer, select in zip(self.layers, self.masks, strict=True):
            h = nn.functional.glu(self.shared(x * mask), -1)
            h = (h + nn.functional.glu(layer(h), -1)) * 0.5**0.5
            decision, attend = h.chunk(2, -1)
            found = found + torch.relu(decision)
            mask = torch.softmax(select(attend) * prior, -1)
            prior = prior * (1.3 - mask)
        return self.head(found)


class _ResidualBlock(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.enter, self.leave = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.leave(self.dropout(torch.relu(self.enter(self.norm(x)))))


class _TabM(nn.Module):
    """TabM: an ensemble of MLPs that share weights, with factors of each member's own."""

    def __init__(self, members: int) -> None:
        super().__init__()
        widths = (_FEATURES, 256, 256)
        self.layers = nn.ModuleList(nn.Linear(k, n) for k, n in pairwise(widths))
        self.factors = nn.ParameterList(
            nn.Parameter(1.0 + 0.1 * torch.randn(members, k)) for k in widths[:-1]
        )
        self.heads = nn.Parameter(torch.randn(members, widths[-1], 1) * 0.06)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        for factor, layer in zip(self.factors, self.layers, strict=True):
            x = torch.relu(layer(x * factor))
        return torch.einsum("bgk,gkn->bgn", x, self.heads)


def _resnet() -> nn.Module:
    blocks = (_ResidualBlock(192, 384) for _ in range(3))
    return nn.Sequential(
        nn.Linear(_FEATURES, 192), *blocks, nn.BatchNorm1d(192), nn.ReLU(), nn.Linear(192, 8)
    )


def _snn() -> nn.Module:
    return mlp(_FEATURES, 256, 256, 256, 8, act=nn.SELU)


def _table() -> Tensor:
    return torch.randn(_ROWS, _FEATURES)


FAMILIES: tuple[Family, ...] = of_torch(
    KIND,
    ft_transformer=lambda: (_FtTransformer(), _table()[:64]),
    tabnet=lambda: (_TabNet(3, 32), _table()),
    resnet_tabular=lambda: (_resnet(), _table()),
    tabm=lambda: (_TabM(16), _table()),
    self_normalizing=lambda: (_snn(), _table()),
)
