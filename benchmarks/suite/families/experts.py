"""Mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.suite.families.blocks import mlp
from benchmarks.suite.families.language import llama_like
from benchmarks.suite.family import Family, of_torch, of_transformers

KIND = "experts"


def _routed(**more: Any) -> dict[str, Any]:
    return llama_like(moe_intermediate_size=128, num_experts_per_tok=2, **more)


class _TopK(nn.Module):
    """Experts in a list, each for the tokens that a router gives it; (M, C) → (M, C)."""

    def __init__(self, channels: int, experts: int, taken: int) -> None:
        super().__init__()
        self.router, self.taken = nn.Linear(channels, experts, bias=False), taken
        self.experts = nn.ModuleList(
            mlp(channels, 256, channels, act=nn.GELU) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.taken, -1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == i)
            y = y.index_add(0, rows, expert(x[rows]) * weights[rows, which, None])
        return y


class _Soft(nn.Module):
    """Soft MoE: slots mixed of all tokens, a stacked MLP each; (B, T, C) → (B, T, C)."""

    def __init__(self, channels: int, experts: int, slots: int, hidden: int) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(channels, experts, slots) * channels**-0.5)
        self.enter = nn.Parameter(torch.randn(experts, channels, hidden) * channels**-0.5)
        self.leave = nn.Parameter(torch.randn(experts, hidden, channels) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("btc,ces->btes", x, self.phi)
        slots = torch.einsum("btc,btes->besc", x, scores.softmax(1))
        h = nn.functional.gelu(torch.einsum("besc,ech->besh", slots, self.enter))
        y = torch.einsum("besh,ehc->besc", h, self.leave)
        mixed = scores.flatten(2).softmax(-1).view_as(scores)
        return torch.einsum("besc,btes->btc", y, mixed)


FAMILIES: tuple[Family, ...] = (
    of_transformers(
        KIND, "mixtral", "Mixtral", **llama_like(intermediate_size=256, num_local_experts=8)
    ),
    of_transformers(KIND, "qwen3-moe", "Qwen3Moe", **_routed(num_experts=16, head_dim=64)),
    of_transformers(
        KIND,
        "olmoe",
        "Olmoe",
        **llama_like(intermediate_size=128, num_experts=16, num_experts_per_tok=4),
    ),
    of_transformers(
        KIND,
        "deepseek-v3",
        "DeepseekV3",
        **_routed(
            n_routed_experts=16,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            q_lora_rank=96,
            kv_lora_rank=64,
            qk_rope_head_dim=32,
            qk_nope_head_dim=32,
            v_head_dim=64,
        )
        | {"num_key_value_heads": 4},
    ),
    of_transformers(
        KIND,
        "gpt-oss",
        "GptOss",
        **llama_like(
            intermediate_size=256,
            num_local_experts=8,
            num_experts_per_tok=2,
            head_dim=64,
            sliding_window=32,
        ),
    ),
    *of_torch(
        KIND,
        top_k_experts=lambda: (_TopK(128, 8, 2), torch.randn(256, 128)),
        soft_moe=lambda: (_Soft(128, 8, 8, 256), torch.randn(2, 64, 128)),
    ),
)
