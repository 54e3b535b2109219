"""Stacked experts of transformers 5: what a module computes, and this op for all of them.

Transformers has a public registry of functions that compute its stacked experts. Nothing here
imports it before ``register`` is called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.core.errors import UnsupportedError
from fastlinear.families.experts import experts

WEIGHTS = ("gate_up_proj", "down_proj")
"""Names of the weights; with ``_bias`` those of the biases."""
_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "LinearActivation": "none",
}
"""Class of an activation in torch or transformers → its name here."""
_PLAIN = "_default_apply_gate"
_CLAMPED: dict[str, tuple[str, str | None, float]] = {
    "GptOssExperts": ("limit", "alpha", 1.0),
    "OpenAIPrivacyFilterExperts": ("limit", "alpha", 1.0),
    "MiniMaxM3VLExperts": ("swiglu_limit", "swiglu_alpha", 1.0),
    "DeepseekV4Experts": ("limit", None, 0.0),
}
"""Class whose gate is silu with a limit → attributes with limit and alpha, and the up offset."""
_DECORATED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module's forward is that of a subclass, not the one that asks the registry."""
    code = getattr(type(module).forward, "__code__", None)
    return "use_experts_implementation" not in getattr(code, "co_qualname", "")


def loop_over_experts(model: nn.Module) -> None:
    """Have a model's stacked experts run by their own forward, a loop, which takes every dtype."""
    for module in model.modules():
        if all(hasattr(module, name) for name in _DECORATED):
            config: Any = getattr(module, "config", None)
            if hasattr(config, "_experts_implementation"):
                config._experts_implementation = "eager"


def options_of(module: nn.Module) -> dict[str, Any] | str:
    """The options of ``fastlinear.experts`` by which it computes what a module of stacked experts
    does, or why there are none."""
    if any(not hasattr(module, name) for name in _DECORATED):
        return "it is not decorated by transformers' use_experts_implementation"
    if not module.has_gate:
        return "it has no gate"
    if getattr(module, "has_post_expert_norm", False):
        return "a norm follows each expert"
    kind: Any = type(module)
    gate = kind._apply_gate
    options: dict[str, Any] = {
        "activation": "silu",
        "stacked": "gate_up",
        "transposed": bool(module.is_transposed),
    }
    if gate.__name__ == _PLAIN:
        activation = type(getattr(module, "act_fn", None)).__name__
        name = _ACTIVATIONS.get(activation)
        if name is None:
            return f"the activation {activation} is not known"
        return options | {"activation": name}
    known = _CLAMPED.get(kind.__name__)
    if known is None or not kind.__module__.startswith("transformers.models."):
        return f"the gate of {kind.__name__} is not known"
    limit, alpha, offset = known
    order = "gate_up" if module.is_concatenated else "interleaved"
    options |= {"stacked": order, "limit": float(getattr(module, limit)), "up_offset": offset}
    return options | {"alpha": float(getattr(module, alpha)) if alpha else 1.0}


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What transformers calls for a module of stacked experts: x (T, H), and (T, k) each → (T, H).

    Raises UnsupportedError where the module computes anything that ``fastlinear.experts`` does not.
    """
    options = options_of(module)
    if isinstance(options, str):
        raise UnsupportedError(
            "experts_implementation='fastlinear'",
            "stacked experts with a gate that fastlinear.experts has",
            f"{type(module).__name__}: {options}",
            "Set another: model.set_experts_implementation('grouped_mm').",
        )
    return by_op(module, options, hidden_states, top_k_index, top_k_weights)


def by_op(
    module: Any,
    options: dict[str, Any],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    backend: str | None = None,
) -> Tensor:
    """The same where ``options_of`` found these options."""
    if top_k_weights.dtype not in (hidden_states.dtype, torch.float32):
        top_k_weights = top_k_weights.to(hidden_states.dtype)
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    weights = module.gate_up_proj, module.down_proj
    given = hidden_states, top_k_index, top_k_weights, *weights, *biases
    return experts(*given, **options, backend=backend)


def register(name: str) -> None:
    """What ``Experts.register_with_transformers`` does."""
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        raise UnsupportedError(
            "fastlinear.nn.Experts.register_with_transformers",
            "transformers 5, whose registry of experts this adds to",
            str(error),
            "Install it: pip install 'transformers>=5'.",
        ) from error
    ExpertsInterface.register(name, experts_forward)
