"""Which modules count as linear sites, and which of them must be left alone.

A refusal is a code and one sentence that says what stands in the way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.wrappers import PLAIN
from fastlinear.profile import observe
from fastlinear.profile.step import is_compiled
from fastlinear.rewrite.swap.forwards import CONV1D_HOME, PLAIN_LINEARS
from fastlinear.rewrite.swap.modules import has_own_forward, is_rewritten

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


@dataclass(frozen=True)
class Refusal:
    """Why a site is left alone: a short code and one sentence."""

    code: str
    reason: str


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear-shaped module by fully qualified name: Linear, Conv1D, quantized and others."""
    return {fqn: m for fqn, m in model.named_modules() if linear_kind(m) is not None}


def rewritten(model: nn.Module) -> list[str]:
    """Names of the modules whose forward fastlinear has swapped; ``""`` is the model's own."""
    return [fqn for fqn, module in model.named_modules() if is_rewritten(module)]


def refuse_rewritten(model: nn.Module, fqn: str) -> Refusal | None:
    """Why a module is left alone that was rewritten, or that lies in one that was; or None."""
    names = fqn.split(".")
    for depth in range(len(names), -1, -1):
        name = ".".join(names[:depth])
        if is_rewritten(model.get_submodule(name)):
            where = "it" if name == fqn else f"{name!r}, in which it lies," if name else "the model"
            return Refusal("already_rewritten", f"optimize_ has rewritten {where} already.")
    return None


def linear_kind(module: nn.Module) -> str | None:
    """``"linear"``, ``"conv1d"``, ``"other"`` (linear-shaped, of a foreign class) or None."""
    kind = observe.linear_kind(module)
    if kind is not None:
        return kind
    name = getattr(module, "original_name", None) or type(module).__name__
    sized = hasattr(module, "in_features") and hasattr(module, "out_features")
    # A wrapper that contains the linear it stands for is not a site; the linear inside is.
    wraps = any(isinstance(m, nn.Linear) for m in module.modules())
    return "other" if name.endswith("Linear") and sized and not wraps else None


def refuse_linear(model: nn.Module, fqn: str, module: nn.Module) -> Refusal | None:
    """The first reason to leave this linear alone, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return Refusal("scripted", "The module is TorchScript and has no Python forward to swap.")
    kind = linear_kind(module)
    if kind == "other":
        if "quantized" in type(module).__module__ or "bitsandbytes" in type(module).__module__:
            return Refusal("quantized", f"Its weights are quantized ({type(module).__name__}).")
        return Refusal("subclass", f"{type(module).__qualname__} is not nn.Linear.")
    common = refuse_module(module) or _refuse_ancestors(model, fqn)
    if common is not None:
        return common
    home = type(module).__module__
    if (kind == "linear" and type(module) not in PLAIN_LINEARS) or (
        kind == "conv1d"
        and not (type(module).__name__ == "Conv1D" and home.startswith(CONV1D_HOME))
    ):
        return Refusal(
            "subclass",
            f"{type(module).__qualname__} is a subclass whose forward may do more than a linear.",
        )
    return _refuse_weights(module)


def refuse_parameters(model: nn.Module, fqn: str, layer: nn.Module) -> Refusal | None:
    """The first reason to leave a linear alone that is written on parameters, or None.

    Args:
        model: the model.
        fqn: the name of what would be a layer of the module whose forward writes it.
        layer: holds its weight and bias.
    """
    return _refuse_ancestors(model, fqn) or _refuse_weights(layer)


def refuse_module(module: nn.Module) -> Refusal | None:
    """Reasons that hold for a linear, an activation or a parent: hooks, parametrizations…"""
    if isinstance(module, torch.jit.ScriptModule):
        return Refusal("scripted", "It is TorchScript and has no Python forward to swap.")
    for attribute, name in _HOOKS.items():
        if getattr(module, attribute, None):
            return Refusal("hooks", f"{type(module).__name__} carries a {name}.")
    if hasattr(module, "parametrizations"):
        names = ", ".join(module.parametrizations)  # type: ignore[arg-type]
        return Refusal("parametrized", f"It is parametrized ({names}).")
    if is_compiled(module):
        return Refusal("compiled", "It is compiled; rewrite it before it is compiled.")
    if is_rewritten(module):
        return None
    if has_own_forward(module):
        return Refusal("own_forward", "Somebody else has already replaced its forward.")
    return _refuse_subclasses(module)


def _refuse_subclasses(module: nn.Module) -> Refusal | None:
    """Tensor subclasses of its own, quantized weights say: only their class knows their values."""
    for name, t in (*module._parameters.items(), *module._buffers.items()):
        if t is not None and type(t) not in PLAIN and not t.is_nested:
            return Refusal("weight_subclass", f"Its {name} is a {type(t).__qualname__}.")
    return None


def _refuse_ancestors(model: nn.Module, fqn: str) -> Refusal | None:
    names = fqn.split(".")
    for i in range(len(names)):
        ancestor = model.get_submodule(".".join(names[:i]))
        if is_compiled(ancestor):
            return Refusal("compiled", "It lies inside a compiled module; rewrite it first.")
        if isinstance(ancestor, torch.jit.ScriptModule):
            return Refusal("scripted", "It lies inside a TorchScript module.")
        if i == len(names) - 1 or names[i] == "base_layer":
            child = names[i]
            if child == "base_layer" or any("lora_" in n for n, _ in ancestor.named_children()):
                name = type(ancestor).__qualname__
                return Refusal("adapter", f"It is wrapped by an adapter ({name}).")
    return None


def _refuse_weights(module: nn.Module) -> Refusal | None:
    for name in ("weight", "bias"):
        value = getattr(module, name, None)
        if value is None:
            continue
        if type(value) not in PLAIN:
            return Refusal("weight_subclass", f"Its {name} is a {type(value).__qualname__}.")
        if type(value.data) is not Tensor:
            return Refusal("weight_subclass", f"Its {name} holds a {type(value.data).__qualname__}")
        if value.is_meta:
            return Refusal("meta", f"Its {name} is on the meta device and holds no values.")
        if value.is_quantized or value.layout is not torch.strided:
            return Refusal("quantized", f"Its {name} is quantized or not a strided tensor.")
        if value.dtype not in DTYPE_NAMES:
            return Refusal("dtype", f"Its {name} has dtype {value.dtype}.")
        if value.device.type not in ("cpu", "cuda"):
            return Refusal("device", f"Its {name} is on device {value.device}.")
    return None
