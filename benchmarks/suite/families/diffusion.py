"""Blocks of diffusion models."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from benchmarks.suite.families.blocks import mlp
from benchmarks.suite.family import Family, of_torch

KIND = "diffusion"


def _frequencies(time: Tensor, width: int) -> Tensor:
    """Sines and cosines of a time, (B,) → (B, width)."""
    steps = torch.arange(width // 2, device=time.device, dtype=time.dtype)
    angles = time[:, None] * torch.exp(-math.log(10_000.0) / (width // 2) * steps)
    return torch.cat((angles.cos(), angles.sin()), -1)


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


class _DitBlock(nn.Module):
    """A block of DiT: shift, scale and gate of both branches from the condition; (B, T, C)."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(channels, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.mlp = mlp(channels, 4 * channels, channels, act=lambda: nn.GELU("tanh"))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(channels, 6 * channels))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(condition)[:, None].chunk(6, -1)
        y = self.norm(x) * (1 + parts[1]) + parts[0]
        q, k, v = (_heads(t, self.heads) for t in self.qkv(y).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + parts[2] * self.out(mixed)
        return x + parts[5] * self.mlp(self.norm(x) * (1 + parts[4]) + parts[3])


class _Dit(nn.Module):
    """Two such blocks behind an embedded time; (B, T, C), (B,) → (B, T, C)."""

    def __init__(self, channels: int = 192) -> None:
        super().__init__()
        self.time = mlp(128, channels, channels, act=nn.SiLU)
        self.blocks = nn.ModuleList(_DitBlock(channels, 3) for _ in range(2))
        self.head = nn.Linear(channels, 32)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        condition = self.time(_frequencies(time, 128))
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x)


class _JointBlock(nn.Module):
    """A block of MM-DiT: text and image with weights of their own, one attention for both."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(channels, 3 * channels) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(channels, channels) for _ in range(2))
        self.mlps = nn.ModuleList(
            mlp(channels, 4 * channels, channels, act=nn.GELU) for _ in range(2)
        )

    def forward(self, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat((self.qkv[0](self.norms[0](text)), self.qkv[1](self.norms[1](image))), 1)
        q, k, v = (_heads(t, self.heads) for t in both.chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        text = text + self.out[0](mixed[:, : text.shape[1]])
        image = image + self.out[1](mixed[:, text.shape[1] :])
        text = text + self.mlps[0](self.norms[2](text))
        return text, image + self.mlps[1](self.norms[3](image))


class _TimeBlock(nn.Module):
    """A residual block of a UNet, shifted by an embedded time; (B, C, H, W), (B, E)."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(8, channels)
        self.shift = nn.Linear(width, channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.first(nn.functional.silu(self.norm(x)))
        h = h + self.shift(nn.functional.silu(time))[:, :, None, None]
        return x + self.second(nn.functional.silu(h))


class _TimeUnet(nn.Module):
    """The time MLP of a UNet and the blocks that read it; (B, C, H, W), (B,)."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.time = mlp(channels, 4 * channels, 4 * channels, act=nn.SiLU)
        self.blocks = nn.ModuleList(_TimeBlock(channels, 4 * channels) for _ in range(3))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        embedded = self.time(_frequencies(time, 64))
        for block in self.blocks:
            x = block(x, embedded)
        return x


class _Denoiser(nn.Module):
    """The residual MLP of diffusion over vectors, as for policies or tables; (B, K), (B,)."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.enter, self.time = nn.Linear(32, width), mlp(64, width, width, act=nn.SiLU)
        self.blocks = nn.ModuleList(mlp(width, width, width, act=nn.Mish) for _ in range(3))
        self.leave = nn.Linear(width, 32)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h, t = self.enter(x), self.time(_frequencies(time, 64))
        for block in self.blocks:
            h = h + block(h + t)
        return self.leave(h)


FAMILIES: tuple[Family, ...] = of_torch(
    KIND,
    dit=lambda: (_Dit(), (torch.randn(2, 64, 192), torch.rand(2) * 1000)),
    mm_dit=lambda: (_JointBlock(192, 3), (torch.randn(2, 16, 192), torch.randn(2, 64, 192))),
    unet_time=lambda: (_TimeUnet(), (torch.randn(2, 64, 16, 16), torch.rand(2) * 1000)),
    mlp_denoiser=lambda: (_Denoiser(), (torch.randn(256, 32), torch.rand(256) * 1000)),
)
