"""Transformers models built from their published configurations, with random weights.

Nothing is downloaded: a configuration object with its defaults has the published sizes.

    fastlinear optimize examples.models:gpt2 --html report.html --plan plan.json
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import nn

TOKENS = 128


def gpt2() -> nn.Module:
    """GPT-2 (124 M parameters, 12 layers of width 768, Conv1D instead of Linear)."""
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(use_cache=False))


def bert() -> nn.Module:
    """BERT base (110 M parameters, 12 layers of width 768)."""
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig())


def vit() -> nn.Module:
    """ViT-B/16 (86 M parameters, 197 tokens an image)."""
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig())


def tokens(vocabulary: int = 30000) -> dict[str, Any]:
    """One sequence of random token ids, shape (1, TOKENS)."""
    return {"input_ids": torch.randint(vocabulary, (1, TOKENS))}


def image() -> dict[str, Any]:
    """One random image, shape (1, 3, 224, 224)."""
    return {"pixel_values": torch.randn(1, 3, 224, 224)}


gpt2.example_inputs = tokens  # type: ignore[attr-defined]
bert.example_inputs = tokens  # type: ignore[attr-defined]
vit.example_inputs = image  # type: ignore[attr-defined]
