"""Functions of coordinates: scenes, images, and what obeys a differential equation."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from benchmarks.suite.families.blocks import mlp
from benchmarks.suite.family import Family, of_torch

KIND = "fields"


class _Nerf(nn.Module):
    """NeRF: positions and directions as frequencies, a skip in the middle; (B, 3) twice."""

    frequencies: Tensor

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(10) * math.pi)
        self.first = mlp(63, width, width, width, width, final=nn.ReLU())
        self.second = mlp(63 + width, width, width, final=nn.ReLU())
        self.density, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.colour = mlp(width + 27, width // 2, 3, final=nn.Sigmoid())

    def _encoded(self, x: Tensor, count: int) -> Tensor:
        angles = (x[..., None] * self.frequencies[:count]).flatten(1)
        return torch.cat((x, angles.sin(), angles.cos()), -1)

    def forward(self, position: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        x = self._encoded(position, 10)
        h = self.second(torch.cat((x, self.first(x)), -1))
        seen = torch.cat((self.feature(h), self._encoded(direction, 4)), -1)
        return torch.relu(self.density(h)), self.colour(seen)


class _Sine(nn.Module):
    """A layer of SIREN: sin(30 (W x + b))."""

    def __init__(self, k: int, n: int, scale: float = 30.0) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(k, n), scale
        bound = (6.0 / k) ** 0.5 / scale
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.scale * self.linear(x))


class _Pinn(nn.Module):
    """A physics-informed network: u, and while it trains the residual of Burgers' equation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2, 64, 64, 64, 64, 1, act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if not self.training:
            return self.net(x)
        x = x.detach().requires_grad_()
        u = self.net(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        residual = first[:, 1:] + u * first[:, :1] - 0.01 / math.pi * second[:, :1]
        return u, residual


class _HashGrid(nn.Module):
    """Instant-NGP in two dimensions: corners of grids by a hash, and a tiny MLP; (B, 2)."""

    sizes: Tensor
    starts: Tensor

    def __init__(self, levels: int = 8, entries: int = 1 << 12) -> None:
        super().__init__()
        self.tables = nn.Parameter(torch.randn(levels * entries, 2) * 0.1)
        sizes = torch.tensor([int(16 * 1.5**i) for i in range(levels)])
        self.register_buffer("sizes", sizes)
        self.register_buffer("starts", torch.arange(levels) * entries)
        self.entries = entries
        self.mlp = mlp(2 * levels, 64, 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        scaled = x[:, None] * self.sizes[:, None]
        corner = scaled.floor()
        part, cell = scaled - corner, corner.long()
        found = x.new_zeros(())
        for i in (0, 1):
            for j in (0, 1):
                key = (cell[..., 0] + i) ^ ((cell[..., 1] + j) * 2654435761)
                values = self.tables[key % self.entries + self.starts]
                a = part[..., 0] if i else 1.0 - part[..., 0]
                b = part[..., 1] if j else 1.0 - part[..., 1]
                found = found + values * (a * b)[..., None]
        return self.mlp(found.flatten(1))


class _DeepOnet(nn.Module):
    """DeepONet: a branch for the function, a trunk for the places; (B, K), (P, 2) → (B, P)."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = mlp(100, 128, 128, 128)
        self.trunk = mlp(2, 128, 128, 128, act=nn.Tanh)

    def forward(self, function: Tensor, places: Tensor) -> Tensor:
        return self.branch(function) @ self.trunk(places).T


class _Fourier(nn.Module):
    """Random Fourier features before an MLP; (B, 2) → (B, 3)."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, 128) * 10.0)
        self.net = mlp(256, 256, 256, 3, final=nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        angles = 2 * math.pi * x @ self.frequencies
        return self.net(torch.cat((angles.sin(), angles.cos()), -1))


class _Distance(nn.Module):
    """A signed distance as DeepSDF has it: a code beside the place, and a skip; (B, 67)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = mlp(67, 256, 256, 189, final=nn.ReLU())
        self.second = mlp(256, 256, 256, 1, final=nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.cat((self.first(x), x), -1))


def _siren() -> nn.Module:
    return nn.Sequential(_Sine(2, 128), _Sine(128, 128), _Sine(128, 128), nn.Linear(128, 3))


FAMILIES: tuple[Family, ...] = of_torch(
    KIND,
    nerf=lambda: (_Nerf(), (torch.rand(512, 3), torch.randn(512, 3))),
    siren=lambda: (_siren(), torch.rand(1024, 2) * 2 - 1),
    pinn=lambda: (_Pinn(), torch.rand(512, 2)),
    hash_grid=lambda: (_HashGrid(), torch.rand(1024, 2)),
    deeponet=lambda: (_DeepOnet(), (torch.randn(64, 100), torch.rand(256, 2))),
    fourier_features=lambda: (_Fourier(), torch.rand(512, 2)),
    deepsdf=lambda: (_Distance(), torch.randn(512, 67)),
)
