"""Torch's own modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.suite.families.blocks import mlp
from benchmarks.suite.family import Built, Family, of_torch

KIND = "torch"


class _Attention(nn.Module):
    """A block of attention and an MLP, norms first; (B, T, C)."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.attention = nn.MultiheadAttention(channels, heads, batch_first=True)
        self.mlp = mlp(channels, 4 * channels, channels, act=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_attention(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm_mlp(x))


class _Recurrent(nn.Module):
    """A recurrent layer whose last state goes through a head; (B, T, C) → (B, N)."""

    def __init__(self, layer: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class _Residual(nn.Module):
    """x + MLP(norm(x))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.enter, self.leave = (
            nn.Linear(channels, 2 * channels),
            nn.Linear(2 * channels, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.leave(torch.relu(self.enter(self.norm(x))))


def _layer(of: type[nn.Module]) -> nn.Module:
    return of(256, 4, 1024, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)


def _encoder() -> Built:
    layer = _layer(nn.TransformerEncoderLayer)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)  # type: ignore[arg-type]
    return model, torch.randn(2, 64, 256)


def _decoder() -> Built:
    model = nn.TransformerDecoder(_layer(nn.TransformerDecoderLayer), 2)  # type: ignore[arg-type]
    return model, (torch.randn(2, 32, 256), torch.randn(2, 64, 256))


def _attention() -> Built:
    return nn.Sequential(_Attention(256, 4), _Attention(256, 4)), torch.randn(2, 64, 256)


def _lstm() -> Built:
    head = mlp(128, 256, 10)
    return _Recurrent(nn.LSTM(64, 128, batch_first=True), head), torch.randn(16, 16, 64)


def _gru() -> Built:
    return _Recurrent(nn.GRU(64, 128, batch_first=True), mlp(128, 64, 10)), torch.randn(16, 16, 64)


def _residual() -> Built:
    return nn.Sequential(*(_Residual(256) for _ in range(4))), torch.randn(128, 256)


def _classifier() -> Built:
    return mlp(784, 512, 256, 10), torch.randn(128, 784)


def _convolutions() -> Built:
    layers = [nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, *mlp(64 * 49, 256, 10)), torch.randn(8, 3, 32, 32)


FAMILIES: tuple[Family, ...] = of_torch(
    KIND,
    transformer_encoder=_encoder,
    transformer_decoder=_decoder,
    multihead_attention=_attention,
    lstm_head=_lstm,
    gru_head=_gru,
    residual_mlp=_residual,
    mlp_classifier=_classifier,
    convolutions_head=_convolutions,
)
