"""Decoders of language models, and what reads sequences by states."""

from __future__ import annotations

from typing import Any

from benchmarks.suite.family import VOCABULARY, Family, of_transformers

KIND = "language"
_LAYERS, _WIDTH, _HEADS = 2, 256, 4


def llama_like(**more: Any) -> dict[str, Any]:
    """The names that most configurations of gated decoders share, with grouped queries."""
    return {
        "hidden_size": _WIDTH,
        "intermediate_size": 688,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
        **more,
    }


def _plain(**more: Any) -> dict[str, Any]:
    """The same of decoders whose MLPs have no gate."""
    names = llama_like(intermediate_size=1024, **more)
    del names["num_key_value_heads"]
    return names


_GPT2: dict[str, Any] = {
    "n_layer": _LAYERS,
    "n_embd": _WIDTH,
    "n_head": _HEADS,
    "n_positions": 256,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}
_STATES: dict[str, Any] = {
    "hidden_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "state_size": 16,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}
_BLOOM: dict[str, Any] = {
    "hidden_size": _WIDTH,
    "n_layer": _LAYERS,
    "n_head": _HEADS,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}

FAMILIES: tuple[Family, ...] = (
    of_transformers(KIND, "gpt2", "GPT2", **_GPT2),
    of_transformers(KIND, "gpt-neox", "GPTNeoX", **_plain()),
    of_transformers(KIND, "gpt-j", "GPTJ", **_GPT2, rotary_dim=32),
    of_transformers(
        KIND,
        "opt",
        "OPT",
        **_plain(ffn_dim=1024, word_embed_proj_dim=_WIDTH),
    ),
    of_transformers(KIND, "bloom", "Bloom", **_BLOOM),
    of_transformers(KIND, "llama", "Llama", **llama_like()),
    of_transformers(KIND, "mistral", "Mistral", **llama_like(sliding_window=32)),
    of_transformers(KIND, "qwen2", "Qwen2", **llama_like()),
    of_transformers(KIND, "qwen3", "Qwen3", **llama_like(head_dim=64)),
    of_transformers(KIND, "gemma2", "Gemma2", **llama_like(head_dim=64, sliding_window=32)),
    of_transformers(KIND, "gemma3", "Gemma3Text", **llama_like(head_dim=64, sliding_window=32)),
    of_transformers(KIND, "phi", "Phi", **llama_like(intermediate_size=1024)),
    of_transformers(KIND, "phi3", "Phi3", **llama_like()),
    of_transformers(KIND, "falcon", "Falcon", **_plain(ffn_hidden_size=1024)),
    of_transformers(KIND, "stablelm", "StableLm", **llama_like()),
    of_transformers(KIND, "starcoder2", "Starcoder2", **llama_like(intermediate_size=1024)),
    of_transformers(KIND, "olmo2", "Olmo2", **llama_like()),
    of_transformers(KIND, "cohere", "Cohere", **llama_like()),
    of_transformers(KIND, "granite", "Granite", **llama_like()),
    of_transformers(KIND, "mamba", "Mamba", **_STATES),
    of_transformers(
        KIND, "mamba2", "Mamba2", **_STATES, num_heads=8, head_dim=64, n_groups=1, chunk_size=32
    ),
    of_transformers(
        KIND,
        "rwkv",
        "Rwkv",
        hidden_size=_WIDTH,
        attention_hidden_size=_WIDTH,
        num_hidden_layers=_LAYERS,
        vocab_size=VOCABULARY,
        use_cache=False,
    ),
)
