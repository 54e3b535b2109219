"""Tiny models of transformers, and which of their linears one call of their attention shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

IDS = torch.arange(16).view(2, 8) % 60
_TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_LLAMA = {**_TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
_BERT = {**_TEXT, "num_attention_heads": 4, "max_position_embeddings": 32}
_IMAGE = {**_BERT, "image_size": 8, "patch_size": 4}
_BART = {
    **{"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "eos_token_id": 2},
    **{"bos_token_id": 1, "decoder_start_token_id": 1, "forced_eos_token_id": None},
}
_WHISPER = {
    **_BART,
    **{"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32},
    **{"suppress_tokens": None, "begin_suppress_tokens": None},
}
_T5 = {
    **{"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    **{"decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"},
}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_LINEARS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Case:
    """A model by its configuration.

    Attributes:
        name: its class; the configuration's is that of the architecture.
        config: the configuration's class.
        settings: of the configuration.
        inputs: of a call.
        groups: the names of linears that share one input; each group in two layers.
        generates: whether it generates tokens with a cache.
    """

    name: str
    config: str
    settings: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]
    groups: tuple[tuple[str, ...], ...]
    generates: bool = False

    def make(self) -> nn.Module:
        """The model with random weights, without dropout."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings)
        model: nn.Module = getattr(transformers, self.name)(config)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.normal_(module.bias, std=0.1)
        for attribute in ("dropout", "attention_dropout", "activation_dropout", "dropout_rate"):
            for module in model.modules():
                if isinstance(vars(module).get(attribute), float):
                    setattr(module, attribute, 0.0)
        return model


def _ids() -> dict[str, Any]:
    return {"input_ids": IDS}


def _pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))}


def _pairs() -> dict[str, Any]:
    return {"input_ids": IDS, "decoder_input_ids": IDS[:, :5] + 1}


def _sound() -> dict[str, Any]:
    features = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    return {"input_features": features, "decoder_input_ids": IDS[:, :5] + 1}


def _both() -> dict[str, Any]:
    return {**_ids(), **_pixels()}


def _at(*homes: str, names: tuple[str, ...] = _LINEARS) -> tuple[tuple[str, ...], ...]:
    """These linears in both layers of each home."""
    return tuple(
        tuple(f"{home.format(i)}.{name}" for name in names) for home in homes for i in range(2)
    )


_DECODER = "model.layers.{}.self_attn"
_QKV = ("query", "key", "value")
_TWO = ("model.encoder.layers.{}.self_attn", "model.decoder.layers.{}.self_attn")
_CROSS = _at("model.decoder.layers.{}.encoder_attn", names=("k_proj", "v_proj"))
_T5_SELF = ("encoder.block.{}.layer.0.SelfAttention", "decoder.block.{}.layer.0.SelfAttention")
_T5_CROSS = _at("decoder.block.{}.layer.1.EncDecAttention", names=("k", "v"))
_T5_GATES = _at(
    *(
        f"{home}.DenseReluDense"
        for home in ("encoder.block.{}.layer.1", "decoder.block.{}.layer.2")
    ),
    names=("wi_0", "wi_1"),
)
_VISION = {k: v for k, v in _IMAGE.items() if k not in ("vocab_size", "max_position_embeddings")}

CASES = {
    "llama": Case("LlamaForCausalLM", "LlamaConfig", _LLAMA, _ids, _at(_DECODER), True),
    "mistral": Case("MistralForCausalLM", "MistralConfig", _LLAMA, _ids, _at(_DECODER), True),
    "qwen2": Case("Qwen2ForCausalLM", "Qwen2Config", _LLAMA, _ids, _at(_DECODER), True),
    "qwen3": Case(
        "Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA, "head_dim": 8}, _ids, _at(_DECODER), True
    ),
    "gemma": Case(
        "GemmaForCausalLM", "GemmaConfig", {**_LLAMA, "head_dim": 8}, _ids, _at(_DECODER), True
    ),
    "neox": Case("GPTNeoXForCausalLM", "GPTNeoXConfig", _BERT, _ids, (), True),
    "opt": Case(
        "OPTForCausalLM",
        "OPTConfig",
        {
            **{"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0},
            **{"word_embed_proj_dim": 32},
        },
        _ids,
        _at("model.decoder.layers.{}.self_attn"),
        True,
    ),
    "bert": Case(
        "BertModel", "BertConfig", _BERT, _ids,
        _at("encoder.layer.{}.attention.self", names=_QKV),
    ),
    "roberta": Case(
        "RobertaModel", "RobertaConfig", _BERT, _ids,
        _at("encoder.layer.{}.attention.self", names=_QKV),
    ),
    "distilbert": Case(
        "DistilBertModel", "DistilBertConfig",
        {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
        _ids, _at("transformer.layer.{}.attention", names=("q_lin", "k_lin", "v_lin")),
    ),
    "vit": Case(
        "ViTModel", "ViTConfig", _VISION, _pixels, _at("layers.{}.attention"),
    ),
    "clip": Case(
        "CLIPModel", "CLIPConfig",
        {"text_config": {**_BERT, **_ENDS}, "vision_config": _VISION, "projection_dim": 16},
        _both,
        _at("text_model.encoder.layers.{}.self_attn", "vision_model.encoder.layers.{}.self_attn"),
    ),
    "bart": Case(
        "BartForConditionalGeneration", "BartConfig", _BART, _pairs, _at(*_TWO) + _CROSS, True
    ),
    "whisper": Case(
        "WhisperForConditionalGeneration", "WhisperConfig", _WHISPER, _sound,
        _at(*_TWO) + _CROSS, True,
    ),
    "t5": Case(
        "T5ForConditionalGeneration", "T5Config", _T5, _pairs,
        _at(*_T5_SELF, names=("q", "k", "v")) + _T5_CROSS + _T5_GATES, True,
    ),
}  # fmt: skip
"""By name."""
