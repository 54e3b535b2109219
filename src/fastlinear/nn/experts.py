"""The experts of a mixture of experts as one module."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError
from fastlinear.core.torchscript import script_layer
from fastlinear.dispatch.backend import check_backend
from fastlinear.families.experts import experts
from fastlinear.families.experts.gate import numbers_of
from fastlinear.families.gated.stacking import STACKED
from fastlinear.nn.arguments import check_made
from fastlinear.nn.recognised import is_hooked
from fastlinear.nn.stacked_experts import WEIGHTS, has_own_forward, options_of, register

_NAME = "fastlinear.nn.Experts"


class Experts(nn.Module):
    """``fastlinear.experts`` as a layer, without the router: ``layer(x, topk_index, topk_weight)``.

    Args:
        experts: E.
        features: H of a token.
        hidden_features: I of an expert.
        bias: whether both projections have biases.
        activation, stacked, transposed, limit, alpha, up_offset, first_expert, recompute, backend:
            as for ``fastlinear.experts``.
        device, dtype: as for ``nn.Linear``.

    Shapes: x (..., H), topk_index and topk_weight (..., k) → (..., H). Every expert starts as
    ``nn.Linear`` layers of its sizes would.

    State, as stacked experts of transformers 5 have it: ``gate_up_proj`` (E, 2I, H) and
    ``down_proj`` (E, H, I), or (E, H, 2I) and (E, I, H) where ``transposed``;
    ``gate_up_proj_bias`` (E, 2I) and ``down_proj_bias`` (E, H).

    Raises:
        InputError: a size that is no whole number or negative, no expert, an unknown name, a number
            out of its range, a dtype that is not served.

    >>> import torch, fastlinear as fl
    >>> layer = fl.nn.Experts(4, 3, 8)
    >>> layer(torch.ones(2, 3), torch.tensor([[0, 3], [1, 2]]), torch.ones(2, 2) / 2).shape
    torch.Size([2, 3])
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    __prepare_scriptable__ = script_layer

    def __init__(
        self,
        experts: int,
        features: int,
        hidden_features: int,
        bias: bool = False,
        activation: str = "silu",
        *,
        stacked: str = "gate_up",
        transposed: bool = False,
        limit: float | None = None,
        alpha: float = 1.0,
        up_offset: float = 0.0,
        first_expert: int = 0,
        recompute: int = 0,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        activation_of(activation, _NAME)
        check_backend(backend, "experts", _NAME)
        sizes = {"experts": experts, "features": features, "hidden_features": hidden_features}
        check_made(_NAME, dtype, **sizes)
        numbers_of(limit, alpha, up_offset)
        if experts < 1:
            raise InputError(
                _NAME, "at least one expert", f"experts={experts!r}", "One is a gated MLP."
            )
        if stacked not in STACKED:
            raise InputError(
                _NAME,
                f"stacked in {', '.join(map(repr, STACKED))}",
                repr(stacked),
                "It says how gate and up lie in gate_up_proj.",
            )
        self.options = {
            "activation": activation,
            "stacked": stacked,
            "transposed": transposed,
            "limit": limit,
            "alpha": alpha,
            "up_offset": up_offset,
        }
        self.first_expert, self.recompute, self.backend = first_expert, recompute, backend
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        both = 2 * hidden_features
        shapes = (experts, both, features), (experts, features, hidden_features)
        biases = (experts, both), (experts, features)
        for name, shape, wide in zip(WEIGHTS, shapes, biases, strict=True):
            lies = (shape[0], shape[2], shape[1]) if transposed else shape
            self.register_parameter(name, nn.Parameter(torch.empty(lies, **made)))
            vector = nn.Parameter(torch.empty(wide, **made)) if bias else None
            self.register_parameter(f"{name}_bias", vector)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as ``nn.Linear`` does for each expert."""
        for name in WEIGHTS:
            weight, bias = getattr(self, name), getattr(self, f"{name}_bias")
            width = weight.shape[1 if self.options["transposed"] else 2]
            bound = 1 / math.sqrt(width) if width else 0.0
            for t in (weight, bias):
                if t is not None:
                    nn.init.uniform_(t, -bound, bound)

    def forward(self, x: Tensor, topk_index: Tensor, topk_weight: Tensor) -> Tensor:
        """x (..., H), topk_index and topk_weight (..., k) → (..., H)."""
        rows, index, weight = (t.reshape(-1, t.shape[-1]) for t in (x, topk_index, topk_weight))
        y = experts(
            *(rows, index, weight, self.gate_up_proj, self.down_proj),
            *(self.gate_up_proj_bias, self.down_proj_bias),
            **self.options,  # type: ignore[arg-type]
            first_expert=self.first_expert,
            recompute=self.recompute,
            backend=self.backend,
        )
        return y.view(x.shape)

    @classmethod
    def from_module(
        cls, module: nn.Module, *, recompute: int = 0, backend: str | None = None
    ) -> Experts:
        """A layer on the parameters of a module of stacked experts of transformers 5, under their
        names: Mixtral's, Qwen3-MoE's, DeepSeek-V3's, OLMoE's, gpt-oss's and others' that
        ``use_experts_implementation`` of transformers has decorated.

        The parameters are shared. The module's place among other processes is not taken over.

        Raises InputError where it is another module, has hooks, more parameters or norms, no gate,
        or one that is not known.
        """
        check_backend(backend, "experts", f"{_NAME}.from_module")
        found = options_of(module) if isinstance(module, nn.Module) else "no module"
        if not isinstance(found, str) and has_own_forward(module):
            found = "a subclass with a forward of its own"
        if not isinstance(found, str) and is_hooked(module):
            found = "hooks, which the new module would not have"
        if not isinstance(found, str) and (more := _others(module)):
            found = f"more state: {', '.join(more)}"
        if isinstance(found, str):
            raise InputError(
                f"{_NAME}.from_module",
                "stacked experts as transformers 5 has them",
                f"{type(module).__name__}: {found}",
                "Call fastlinear.experts on its parameters.",
            )
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        for name in WEIGHTS:
            made.register_parameter(name, module._parameters[name])
            made.register_parameter(f"{name}_bias", module._parameters.get(f"{name}_bias"))
        made.options, made.first_expert = found, 0
        made.recompute, made.backend = recompute, backend
        return made.train(module.training)

    @staticmethod
    def register_with_transformers(name: str = "fastlinear") -> None:
        """Register ``fastlinear.experts`` as an implementation of transformers' stacked experts.

        Afterwards ``model.set_experts_implementation("fastlinear")`` has a model's experts run it,
        as has ``from_pretrained(..., experts_implementation="fastlinear")``. No weight is changed.
        A gate that it does not know raises UnsupportedError in the model's forward.

        Args:
            name: by which transformers is to know it.

        Raises:
            UnsupportedError: transformers is not installed, or has no registry of experts.
        """
        register(name)

    def extra_repr(self) -> str:
        """Sizes, and what is not in the parameters."""
        experts, *sizes = self.down_proj.shape
        features, hidden = reversed(sizes) if self.options["transposed"] else sizes
        usual = {"stacked": "gate_up", "transposed": False, "limit": None} | {
            **{"alpha": 1.0, "up_offset": 0.0}
        }
        more = (
            f"{name}={value!r}"
            for name, value in self.options.items()
            if name not in usual or usual[name] != value
        )
        named = f"experts={experts}, features={features}, hidden_features={hidden}"
        return ", ".join((named, f"bias={self.down_proj_bias is not None}", *more))


def _others(module: nn.Module) -> list[str]:
    """State of a module besides what the layer takes over."""
    taken = {*WEIGHTS, *(f"{name}_bias" for name in WEIGHTS)}
    return [name for name in module.state_dict(keep_vars=True) if name not in taken]
