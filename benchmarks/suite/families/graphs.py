"""Graphs and sets of points, by dense products, ``index_add`` and reductions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.suite.families.blocks import mlp
from benchmarks.suite.family import Built, Family, of_torch

KIND = "graphs"
_NODES, _EDGES, _WIDTH = 256, 1024, 128


def _summed(values: Tensor, at: Tensor, nodes: int) -> Tensor:
    """The sum of the values that arrive at each node; (E, C) → (V, C)."""
    return values.new_zeros(nodes, values.shape[-1]).index_add(0, at, values)


class _Gcn(nn.Module):
    """Two graph convolutions with a dense, normalised adjacency; (V, C), (V, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_WIDTH, 256), nn.Linear(256, 16)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ self.second(torch.relu(adjacency @ self.first(x)))


class _Sage(nn.Module):
    """GraphSAGE: a linear of the node and one of its neighbours' mean."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList((nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 16)))
        self.others = nn.ModuleList((nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 16)))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        degree = _summed(torch.ones_like(target, dtype=x.dtype)[:, None], target, _NODES)
        for i, (own, others) in enumerate(zip(self.own, self.others, strict=True)):
            mean = _summed(x[source], target, _NODES) / degree.clamp(min=1.0)
            x = own(x) + others(mean)
            x = torch.relu(x) if i == 0 else x
        return x


class _Gat(nn.Module):
    """Graph attention with dense scores; (V, C), (V, V) → (V, C)."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.value = heads, nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.source, self.target = nn.Linear(_WIDTH, heads), nn.Linear(_WIDTH, heads)
        self.head = nn.Linear(_WIDTH, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.value(x)
        scores = self.source(h).T[:, :, None] + self.target(h).T[:, None, :]
        scores = nn.functional.leaky_relu(scores, 0.2).masked_fill(mask == 0, -1e9)
        parts = h.view(_NODES, self.heads, -1).transpose(0, 1)
        mixed = (scores.softmax(-1) @ parts).transpose(0, 1).flatten(1)
        return self.head(nn.functional.elu(mixed))


class _Gin(nn.Module):
    """Graph isomorphism network: an MLP over the sum of the node and its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(_WIDTH, 256, _WIDTH) for _ in range(3))
        self.head = nn.Linear(_WIDTH, 1)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x + _summed(x[source], target, _NODES)))
        return self.head(x.mean(0))


class _Equivariant(nn.Module):
    """EGNN: messages by distance, which move features and places; (V, C), (V, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.message = mlp(2 * _WIDTH + 1, 128, 128, act=nn.SiLU, final=nn.SiLU())
        self.move = mlp(128, 128, 1, act=nn.SiLU)
        self.update = mlp(_WIDTH + 128, 128, _WIDTH, act=nn.SiLU)

    def forward(
        self, x: Tensor, places: Tensor, source: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        apart = places[target] - places[source]
        near = apart.square().sum(-1, keepdim=True)
        m = self.message(torch.cat((x[target], x[source], near), -1))
        places = places + _summed(apart * self.move(m), target, _NODES) / _NODES
        return x + self.update(torch.cat((x, _summed(m, target, _NODES)), -1)), places


class _Filtered(nn.Module):
    """A block of SchNet: filters made of distances; (V, C), (E, R)."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = mlp(32, 128, 128, act=nn.Softplus)
        self.enter = nn.Linear(_WIDTH, 128, bias=False)
        self.leave = mlp(128, 128, _WIDTH, act=nn.Softplus)

    def forward(self, x: Tensor, radial: Tensor, source: Tensor, target: Tensor) -> Tensor:
        m = self.enter(x)[source] * self.filters(radial)
        return x + self.leave(_summed(m, target, _NODES))


class _PointNet(nn.Module):
    """PointNet: an MLP of every point by convolutions of length one; (B, 3, P) → (B, 40)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for k, n in ((3, 64), (64, 128), (128, 256)):
            layers += [nn.Conv1d(k, n, 1), nn.BatchNorm1d(n), nn.ReLU()]
        self.points, self.head = nn.Sequential(*layers), mlp(256, 256, 128, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).amax(-1))


def _edges() -> tuple[Tensor, Tensor]:
    return torch.randint(_NODES, (_EDGES,)), torch.randint(_NODES, (_EDGES,))


def _nodes() -> Tensor:
    return torch.randn(_NODES, _WIDTH)


def _adjacency() -> Tensor:
    near = (torch.rand(_NODES, _NODES) < 0.05).float() + torch.eye(_NODES)
    scale = near.sum(-1).rsqrt()
    return scale[:, None] * near * scale


def _egnn() -> Built:
    return _Equivariant(), (_nodes(), torch.randn(_NODES, 3), *_edges())


FAMILIES: tuple[Family, ...] = of_torch(
    KIND,
    gcn=lambda: (_Gcn(), (_nodes(), _adjacency())),
    graphsage=lambda: (_Sage(), (_nodes(), *_edges())),
    gat=lambda: (_Gat(), (_nodes(), _adjacency())),
    gin=lambda: (_Gin(), (_nodes(), *_edges())),
    egnn=_egnn,
    schnet=lambda: (_Filtered(), (_nodes(), torch.rand(_EDGES, 32), *_edges())),
    pointnet=lambda: (_PointNet(), torch.randn(4, 3, 128)),
)
