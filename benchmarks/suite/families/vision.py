"""Images, alone and beside text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.suite.family import Built, Family, of_torch, of_transformers, pixels, tokens

KIND = "vision"
_VIT: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 64,
    "patch_size": 8,
}
_TEXT: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "vocab_size": 1000,
}


def _both() -> dict[str, Tensor]:
    return {**tokens(), **pixels()}


class _Mixer(nn.Module):
    """A block of MLP-Mixer: an MLP over patches, then one over channels; (B, P, C)."""

    def __init__(self, patches: int, channels: int) -> None:
        super().__init__()
        self.norm_patches, self.norm_channels = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.patches = nn.Sequential(
            nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches)
        )
        self.channels = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.patches(self.norm_patches(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_channels(x))


class _GatedMlp(nn.Module):
    """A block of gMLP: half of the channels gate the other half along the patches; (B, P, C)."""

    def __init__(self, patches: int, channels: int) -> None:
        super().__init__()
        self.norm, self.norm_gate = nn.LayerNorm(channels), nn.LayerNorm(2 * channels)
        self.enter = nn.Linear(channels, 4 * channels)
        self.along = nn.Conv1d(patches, patches, 1)
        self.leave = nn.Linear(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        u, v = nn.functional.gelu(self.enter(self.norm(x))).chunk(2, -1)
        return x + self.leave(u * self.along(self.norm_gate(v)))


def _patched(*blocks: nn.Module) -> Built:
    """Blocks of 64 patches of 192 channels between an embedding and a head."""
    layers = (nn.Linear(192, 192), *blocks, nn.LayerNorm(192), nn.Linear(192, 100))
    return nn.Sequential(*layers), torch.randn(4, 64, 192)


def _mlp_mixer() -> Built:
    return _patched(_Mixer(64, 192), _Mixer(64, 192))


def _gmlp() -> Built:
    return _patched(_GatedMlp(64, 192), _GatedMlp(64, 192))


def _of_timm(name: str, **values: Any) -> Family:
    def build() -> Built:
        import timm

        return timm.create_model(name, **values), torch.randn(2, 3, 64, 64)

    return Family(f"timm-{name.replace('_', '-')}", KIND, build, "timm")


_SMALL: dict[str, Any] = {"img_size": 64, "depth": 2, "num_classes": 100}
_SWIN: dict[str, Any] = {"embed_dim": 48, "depths": [1, 1], "num_heads": [3, 6]}
_SWIN |= {"image_size": 64, "window_size": 4}

FAMILIES: tuple[Family, ...] = (
    of_transformers(KIND, "vit", "ViT", pixels, **_VIT),
    of_transformers(KIND, "deit", "DeiT", pixels, **_VIT),
    of_transformers(KIND, "beit", "Beit", pixels, **_VIT),
    of_transformers(KIND, "swin", "Swin", pixels, **_SWIN),
    of_transformers(
        KIND, "clip", "CLIP", _both, text_config=_TEXT, vision_config=_VIT, projection_dim=128
    ),
    of_transformers(
        KIND,
        "siglip",
        "Siglip",
        _both,
        text_config=_TEXT | {"max_position_embeddings": 64},
        vision_config=_VIT,
    ),
    of_transformers(KIND, "dinov2", "Dinov2", pixels, **_VIT, mlp_ratio=4),
    of_transformers(
        KIND, "convnext", "ConvNext", pixels, hidden_sizes=[48, 96, 192, 192], depths=[1, 1, 1, 1]
    ),
    *of_torch(KIND, mlp_mixer=_mlp_mixer, gmlp=_gmlp),
    _of_timm("vit_tiny_patch16_224", **_SMALL),
    _of_timm("eva02_tiny_patch14_224", img_size=56, depth=2, num_classes=100),
    _of_timm("mixer_s32_224", img_size=64, num_blocks=2, num_classes=100),
)
