"""Encoders of text, and encoders with decoders."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.suite.family import ROWS, TOKENS, VOCABULARY, Family, of_transformers, tokens

KIND = "encoders"
_BERT: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
}
_T5: dict[str, Any] = {
    "d_model": 256,
    "d_kv": 64,
    "num_heads": 4,
    "num_layers": 2,
    "vocab_size": VOCABULARY,
}


def _both() -> dict[str, torch.Tensor]:
    """Tokens for an encoder and its decoder."""
    return {**tokens(), "decoder_input_ids": torch.randint(3, VOCABULARY, (ROWS, TOKENS // 2))}


FAMILIES: tuple[Family, ...] = (
    of_transformers(KIND, "bert", "Bert", **_BERT),
    of_transformers(KIND, "roberta", "Roberta", **_BERT),
    of_transformers(KIND, "albert", "Albert", **_BERT, embedding_size=64),
    of_transformers(
        KIND,
        "distilbert",
        "DistilBert",
        dim=256,
        hidden_dim=1024,
        n_layers=2,
        n_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
    ),
    of_transformers(KIND, "electra", "Electra", **_BERT, embedding_size=64),
    of_transformers(
        KIND,
        "deberta-v2",
        "DebertaV2",
        **_BERT,
        relative_attention=True,
        position_buckets=32,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    of_transformers(KIND, "mpnet", "MPNet", **_BERT),
    of_transformers(
        KIND,
        "modernbert",
        "ModernBert",
        **_BERT | {"intermediate_size": 384},
        pad_token_id=0,
        local_attention=32,
    ),
    of_transformers(KIND, "t5-encoder", "T5", model="T5EncoderModel", **_T5, d_ff=1024),
    of_transformers(
        KIND,
        "t5-v1.1-encoder",
        "T5",
        model="T5EncoderModel",
        **_T5,
        d_ff=640,
        feed_forward_proj="gated-gelu",
    ),
    of_transformers(
        KIND,
        "bart",
        "Bart",
        _both,
        d_model=256,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        use_cache=False,
    ),
    of_transformers(
        KIND,
        "xlnet",
        "XLNet",
        d_model=256,
        n_layer=2,
        n_head=4,
        d_inner=1024,
        vocab_size=VOCABULARY,
    ),
)
