"""Models of distributions: codes, flows and adversaries."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.suite.families.blocks import mlp
from benchmarks.suite.family import Family, of_torch

KIND = "generative"


class _Vae(nn.Module):
    """A variational autoencoder; what is drawn comes as an input; (B, 784), (B, Z)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(784, 256, 128, final=nn.ReLU())
        self.mean, self.log_var = nn.Linear(128, 32), nn.Linear(128, 32)
        self.decoder = mlp(32, 128, 256, 784, final=nn.Sigmoid())

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mean, log_var = self.mean(h), self.log_var(h)
        return self.decoder(mean + torch.exp(0.5 * log_var) * noise), mean, log_var


class _Coupling(nn.Module):
    """A coupling of RealNVP: half of x scales and shifts the other half; (B, D)."""

    def __init__(self, size: int, width: int, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.scale = mlp(size // 2, width, width, size // 2, act=nn.Tanh)
        self.shift = mlp(size // 2, width, width, size // 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, -1)
        a, b = (b, a) if self.turned else (a, b)
        s = torch.tanh(self.scale(a))
        b = b * torch.exp(s) + self.shift(a)
        return torch.cat((b, a) if self.turned else (a, b), -1), s.sum(-1)


class _Flow(nn.Module):
    """Eight couplings, and the logarithm of the determinant; (B, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Coupling(16, 64, i % 2 == 1) for i in range(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        determinant = x.new_zeros(x.shape[0])
        for layer in self.layers:
            x, more = layer(x)
            determinant = determinant + more
        return x, determinant


class _Masked(nn.Linear):
    """A linear of MADE, whose mask keeps outputs from later inputs."""

    mask: Tensor

    def __init__(self, k: int, n: int) -> None:
        super().__init__(k, n)
        before = torch.arange(n)[:, None] % 16 >= torch.arange(k)[None] % 16
        self.register_buffer("mask", before.float())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.mask * self.weight, self.bias)


class _Quantised(nn.Module):
    """A VQ autoencoder over vectors: the nearest code, its gradient passed through; (B, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 128, 128, 32), mlp(32, 128, 128, 64)
        self.codes = nn.Parameter(torch.randn(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        apart = z.square().sum(-1, keepdim=True) - 2 * z @ self.codes.T
        nearest = (apart + self.codes.square().sum(-1)).argmin(-1)
        return self.decoder(z + (self.codes[nearest] - z).detach())


def _autoencoder() -> nn.Module:
    return mlp(784, 256, 64, 16, 64, 256, 784, final=nn.Sigmoid())


def _gan() -> nn.Module:
    critic = mlp(256, 256, 128, 1, act=lambda: nn.LeakyReLU(0.2))
    return nn.Sequential(mlp(64, 128, 256, 256, final=nn.Tanh()), critic)


def _made() -> nn.Module:
    return nn.Sequential(
        _Masked(16, 256), nn.ReLU(), _Masked(256, 256), nn.ReLU(), _Masked(256, 32)
    )


FAMILIES: tuple[Family, ...] = of_torch(
    KIND,
    autoencoder=lambda: (_autoencoder(), torch.randn(128, 784)),
    vae=lambda: (_Vae(), (torch.rand(128, 784), torch.randn(128, 32))),
    realnvp=lambda: (_Flow(), torch.randn(256, 16)),
    made=lambda: (_made(), torch.randn(256, 16)),
    vq_autoencoder=lambda: (_Quantised(), torch.randn(256, 64)),
    gan=lambda: (_gan(), torch.randn(128, 64)),
)
