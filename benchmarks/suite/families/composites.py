"""Linears in unusual places: adapters, generated weights, solvers, sets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.suite.families.blocks import mlp
from benchmarks.suite.family import Family, of_torch

KIND = "composites"


class _Lora(nn.Module):
    """A frozen linear and the product of two small ones beside it."""

    def __init__(self, k: int, n: int, rank: int = 8) -> None:
        super().__init__()
        self.base_layer = nn.Linear(k, n).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(k, rank, bias=False), nn.Linear(rank, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2.0 * self.lora_b(self.lora_a(x))


class _Hyper(nn.Module):
    """A network that makes the weights of another for every row; (B, C), (B, P, 2) → (B, P, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.widths = ((2, 32), (32, 32), (32, 3))
        self.make = mlp(32, 128, sum(k * n + n for k, n in self.widths))

    def forward(self, code: Tensor, x: Tensor) -> Tensor:
        made, at = self.make(code), 0
        for i, (k, n) in enumerate(self.widths):
            weight = made[:, at : at + k * n].view(-1, k, n)
            bias = made[:, at + k * n : at + k * n + n]
            x = torch.baddbmm(bias[:, None], x, weight * k**-0.5)
            x = torch.relu(x) if i < 2 else x
            at += k * n + n
        return x


class _Ode(nn.Module):
    """A neural ODE by four steps of Runge and Kutta; (B, D) → (B, D)."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.slope = mlp(size + 1, 128, 128, size, act=nn.Tanh)

    def _at(self, time: float, x: Tensor) -> Tensor:
        return self.slope(torch.cat((x, torch.full_like(x[:, :1], time)), -1))

    def forward(self, x: Tensor) -> Tensor:
        step = 0.25
        for i in range(4):
            time = i * step
            a = self._at(time, x)
            b = self._at(time + step / 2, x + step / 2 * a)
            c = self._at(time + step / 2, x + step / 2 * b)
            d = self._at(time + step, x + step * c)
            x = x + step / 6 * (a + 2 * b + 2 * c + d)
        return x


class _Mab(nn.Module):
    """Attention from one set to another, and a layer behind; (B, T, C), (B, S, C)."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(channels, channels) for _ in range(3))
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = (self.q(x), self.k(y), self.v(y))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in made)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        h = made[0] + mixed
        return h + torch.relu(self.out(h))


class _SetTransformer(nn.Module):
    """Induced points in the encoder, one seed in the pooling; (B, T, 16) → (B, 4)."""

    def __init__(self, channels: int = 128) -> None:
        super().__init__()
        self.enter = nn.Linear(16, channels)
        self.points = nn.Parameter(torch.randn(1, 16, channels))
        self.seed = nn.Parameter(torch.randn(1, 1, channels))
        self.down, self.up, self.pool = (_Mab(channels, 4) for _ in range(3))
        self.head = nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        points = self.points.expand(x.shape[0], -1, -1)
        x = self.up(x, self.down(points, x))
        return self.head(self.pool(self.seed.expand(x.shape[0], -1, -1), x)[:, 0])


class _Perceiver(nn.Module):
    """Few latents that read many inputs, then each other; (B, T, 64) → (B, 10)."""

    def __init__(self, channels: int = 128) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 32, channels) * 0.1)
        self.enter = nn.Linear(64, channels)
        self.read = nn.MultiheadAttention(channels, 1, batch_first=True)
        layer = nn.TransformerEncoderLayer(channels, 4, 4 * channels, 0.0, "gelu", batch_first=True)
        self.think = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.enter(x), self.latents.expand(x.shape[0], -1, -1)
        z = z + self.read(z, x, x, need_weights=False)[0]
        return self.head(self.think(z).mean(1))


class _DeepSets(nn.Module):
    """An MLP of every member, a sum, an MLP of the sum; (B, T, 16) → (B, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = mlp(16, 128, 128, 128), mlp(128, 128, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.all(self.each(x).sum(1))


class _Heads(nn.Module):
    """Many small heads of different widths behind one trunk; (B, 128)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(128, 256, 256, final=nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(256, n) for n in (2, 3, 5, 8, 13, 21, 34, 55))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.trunk(x)
        return tuple(head(h) for head in self.heads)


class _Functional(nn.Module):
    """An MLP written on parameters, as research code has it; (B, 64) → (B, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(64, 256) * 64**-0.5)
        self.b1 = nn.Parameter(torch.zeros(256))
        self.w2 = nn.Parameter(torch.randn(256, 10) * 256**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w1 + self.b1) @ self.w2


def _lora() -> nn.Module:
    return nn.Sequential(_Lora(256, 1024), nn.GELU(), _Lora(1024, 256))


FAMILIES: tuple[Family, ...] = of_torch(
    KIND,
    lora=lambda: (_lora(), torch.randn(128, 256)),
    hypernetwork=lambda: (_Hyper(), (torch.randn(32, 32), torch.rand(32, 64, 2))),
    neural_ode=lambda: (_Ode(), torch.randn(128, 32)),
    set_transformer=lambda: (_SetTransformer(), torch.randn(8, 64, 16)),
    perceiver=lambda: (_Perceiver(), torch.randn(4, 128, 64)),
    deep_sets=lambda: (_DeepSets(), torch.randn(16, 32, 16)),
    multi_task_heads=lambda: (_Heads(), torch.randn(128, 128)),
    functional_mlp=lambda: (_Functional(), torch.randn(128, 64)),
)
