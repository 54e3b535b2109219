"""What a linear layer does besides ``x Wᵀ + b``, and other code on its parameters would lose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooked(module: nn.Module) -> bool:
    """Whether calling the module calls hooks of its own."""
    return any(getattr(module, hooks) for hooks in _HOOKS)


def replaced_forward(module: nn.Module) -> bool:
    """Whether this instance has another ``forward`` than its class."""
    own = vars(module).get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def why_not_linear(module: Any, forward: Any = nn.Linear.forward) -> str | None:
    """What else calling this module does than ``forward`` on its weight and bias, or None.

    A parametrized weight is allowed: reading it computes it.
    """
    return why_not_plain(module, nn.Linear, forward)


def why_not_plain(module: Any, expected: type[nn.Module], forward: Any) -> str | None:
    """The same for a module of that class or a subclass."""
    kind = type(module)
    if not isinstance(module, expected):
        return f"a {kind.__name__}"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return f"a {kind.__name__} whose sizes are not known yet"
    if kind.forward is not forward or kind.__call__ is not nn.Module.__call__:
        return f"{kind.__qualname__}, a subclass with a forward of its own"
    if replaced_forward(module):
        return f"a {kind.__name__} whose forward was replaced"
    if hooked(module):
        return f"a {kind.__name__} with hooks, as of weight_norm, spectral_norm or pruning"
    return None


def why_not_shared(module: nn.Module) -> str | None:
    """Why the weight and bias of this layer cannot be given to another layer, or None."""
    parameters: Mapping[str, Any] = module._parameters
    for name in ("weight", "bias"):
        if name not in parameters:
            return f"a {name} that is no parameter: parametrized, pruned or computed from others"
    return None
