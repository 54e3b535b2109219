"""Recommenders: embeddings of categories beside numbers, and MLPs over both."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.suite.families.blocks import mlp
from benchmarks.suite.family import Family, of_torch

KIND = "recommenders"
_ROWS, _FIELDS, _IDS, _NUMBERS, _WIDTH = 256, 16, 200, 13, 32


class _Embedded(nn.Module):
    """Fields of categories, all in one table; (B, F) → (B, F, C)."""

    first: Tensor

    def __init__(self, width: int = _WIDTH) -> None:
        super().__init__()
        self.table = nn.Embedding(_FIELDS * _IDS, width)
        self.register_buffer("first", torch.arange(_FIELDS) * _IDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids + self.first)


class _Dlrm(nn.Module):
    """DLRM: products of all pairs of fields between a bottom and a top MLP."""

    rows: Tensor
    columns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedded = _Embedded()
        self.bottom = mlp(_NUMBERS, 256, 128, _WIDTH, final=nn.ReLU())
        rows, columns = torch.tril_indices(_FIELDS + 1, _FIELDS + 1, -1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)
        self.top = mlp(_WIDTH + len(rows), 256, 128, 1)

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(numbers)
        fields = torch.cat((x[:, None], self.embedded(ids)), 1)
        pairs = torch.bmm(fields, fields.transpose(1, 2))[:, self.rows, self.columns]
        return torch.sigmoid(self.top(torch.cat((x, pairs), -1)))


class _Cross(nn.Module):
    """DCN v2: cross layers x0 * (W x + b) + x beside a deep MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded = _Embedded(16)
        width = _FIELDS * 16 + _NUMBERS
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.deep = mlp(width, 256, 128, final=nn.ReLU())
        self.head = nn.Linear(width + 128, 1)

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        first = torch.cat((numbers, self.embedded(ids).flatten(1)), -1)
        x = first
        for layer in self.cross:
            x = first * layer(x) + x
        return torch.sigmoid(self.head(torch.cat((x, self.deep(first)), -1)))


class _DeepFm(nn.Module):
    """DeepFM: a factorisation machine beside a deep MLP over the same embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded, self.linear = _Embedded(16), _Embedded(1)
        self.deep = mlp(_FIELDS * 16, 256, 256, 1)

    def forward(self, ids: Tensor) -> Tensor:
        fields = self.embedded(ids)
        pairs = 0.5 * (fields.sum(1).square() - fields.square().sum(1)).sum(-1, keepdim=True)
        return torch.sigmoid(self.linear(ids).sum(1) + pairs + self.deep(fields.flatten(1)))


class _TwoTower(nn.Module):
    """Two towers and the cosine of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = mlp(128, 256, 128, 64), mlp(96, 256, 128, 64)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        u = nn.functional.normalize(self.users(users), dim=-1)
        return u @ nn.functional.normalize(self.items(items), dim=-1).T


class _WideDeep(nn.Module):
    """Wide & deep: one linear over all features beside an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded = _Embedded(8)
        width = _FIELDS * 8 + _NUMBERS
        self.wide, self.deep = nn.Linear(width, 1), mlp(width, 256, 128, 64, 1)

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        x = torch.cat((numbers, self.embedded(ids).flatten(1)), -1)
        return self.wide(x) + self.deep(x)


class _Mmoe(nn.Module):
    """MMoE: experts that several tasks mix by gates of their own."""

    def __init__(self, experts: int, tasks: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp(128, 128, 64, final=nn.ReLU()) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(128, experts) for _ in range(tasks))
        self.towers = nn.ModuleList(mlp(64, 32, 1) for _ in range(tasks))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = torch.stack([expert(x) for expert in self.experts], 1)
        gated = [(gate(x).softmax(-1)[..., None] * found).sum(1) for gate in self.gates]
        return tuple(tower(g) for tower, g in zip(self.towers, gated, strict=True))


class _Interest(nn.Module):
    """DIN: an MLP weighs the user's history by the item at hand; (B, T, C), (B, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = mlp(4 * _WIDTH, 80, 40, 1, act=nn.Sigmoid)
        self.head = mlp(2 * _WIDTH, 200, 80, 1, act=nn.PReLU)

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        other = item[:, None].expand_as(history)
        x = torch.cat((other, history, other - history, other * history), -1)
        kept = (self.weigh(x) * history).sum(1)
        return self.head(torch.cat((kept, item), -1))


def _ids() -> Tensor:
    return torch.randint(_IDS, (_ROWS, _FIELDS))


def _numbers() -> Tensor:
    return torch.randn(_ROWS, _NUMBERS)


FAMILIES: tuple[Family, ...] = of_torch(
    KIND,
    dlrm=lambda: (_Dlrm(), (_numbers(), _ids())),
    dcn_v2=lambda: (_Cross(), (_numbers(), _ids())),
    deepfm=lambda: (_DeepFm(), _ids()),
    two_tower=lambda: (_TwoTower(), (torch.randn(_ROWS, 128), torch.randn(_ROWS, 96))),
    wide_deep=lambda: (_WideDeep(), (_numbers(), _ids())),
    mmoe=lambda: (_Mmoe(8, 2), torch.randn(_ROWS, 128)),
    din=lambda: (_Interest(), (torch.randn(64, 20, _WIDTH), torch.randn(64, _WIDTH))),
)
