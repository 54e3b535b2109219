"""Sound."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.suite.family import VOCABULARY, Family, of_transformers

KIND = "speech"
_WAVES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (64, 64, 64),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 8, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}


def _wave() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 5200)}


def _mel() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, 16))
    return {"input_features": torch.randn(2, 40, 200), "decoder_input_ids": ids}


FAMILIES: tuple[Family, ...] = (
    of_transformers(KIND, "wav2vec2", "Wav2Vec2", _wave, **_WAVES),
    of_transformers(KIND, "hubert", "Hubert", _wave, **_WAVES),
    of_transformers(
        KIND,
        "whisper",
        "Whisper",
        _mel,
        d_model=192,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=768,
        decoder_ffn_dim=768,
        num_mel_bins=40,
        max_source_positions=100,
        max_target_positions=64,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    ),
)
