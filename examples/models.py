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


def smollm() -> nn.Module:
    """Llama's architecture as SmolLM-135M has it (30 layers of width 576, gated MLPs with silu)."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        use_cache=False,
    )
    return LlamaModel(config)


def t5() -> nn.Module:
    """The encoder of T5 v1.1 base (12 layers of width 768, gated MLPs with gelu)."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        d_model=768,
        d_kv=64,
        d_ff=2048,
        num_heads=12,
        num_layers=12,
        feed_forward_proj="gated-gelu",
        vocab_size=32128,
    )
    return T5EncoderModel(config)


def tokens(vocabulary: int = 30000) -> dict[str, Any]:
    """One sequence of random token ids, shape (1, TOKENS)."""
    return {"input_ids": torch.randint(vocabulary, (1, TOKENS))}


def image() -> dict[str, Any]:
    """One random image, shape (1, 3, 224, 224)."""
    return {"pixel_values": torch.randn(1, 3, 224, 224)}


gpt2.example_inputs = tokens  # type: ignore[attr-defined]
bert.example_inputs = tokens  # type: ignore[attr-defined]
vit.example_inputs = image  # type: ignore[attr-defined]
smollm.example_inputs = tokens  # type: ignore[attr-defined]
t5.example_inputs = tokens  # type: ignore[attr-defined]
