"""A gated MLP as one module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError, not_invariant
from fastlinear.core.settings import BATCH_INVARIANT, asked
from fastlinear.core.torchscript import script_layer
from fastlinear.dispatch.backend import check_backend
from fastlinear.families.gated.op import call
from fastlinear.families.gated.stacking import STACKED, split_pre
from fastlinear.families.gated.validation import OTHER_GATE
from fastlinear.families.linear.op import call as linear
from fastlinear.nn.arguments import check_made
from fastlinear.nn.recognised import (
    PLAIN,
    Gated,
    is_hooked,
    plain_weights,
    recognised,
)

_NAME = "fastlinear.nn.GatedMLP"
_OWN = ("gated", "recompute", "backend", "training")  # attributes of instances


class GatedMLP(nn.Module):
    """``(act(x Wgᵀ + bg) ∘ (x Wuᵀ + bu)) Wdᵀ + bd`` as one layer, on linear layers of usual names.

    Args:
        in_features: K.
        hidden_features: H.
        out_features: N; None for K.
        bias: whether the linear layers have biases.
        activation: of the gate, a name ``fastlinear.gated_mlp`` knows.
        stacked: ``"gate_up"``, ``"up_gate"`` or ``"interleaved"`` for one layer that holds both
            halves; None for two.
        names: of the linear layers, which the keys of the ``state_dict`` begin with; None for
            ``gate_proj``, ``up_proj``, ``down_proj``, or ``gate_up_proj``, ``down_proj``.
        dropout: the rate at which what the gate lets through is dropped in training.
        recompute: what training keeps, as for ``fastlinear.gated_mlp``.
        backend: force a backend; None lets fastlinear choose.
        device, dtype: as for ``nn.Linear``.

    Shapes: input (..., K) → output (..., N). The layer reads the parameters of its linear layers,
    and does not call them; where one of them is no longer a plain ``nn.Linear`` (an adapter was put
    in its place), or has hooks or parametrizations, it calls all of them and fuses nothing.

    Raises:
        InputError: a size that is no whole number or negative, an unknown activation or order, a
            wrong number of names or one that is taken, a rate outside [0, 1), a dtype that is not
            served.

    >>> import torch, fastlinear as fl
    >>> layer = fl.nn.GatedMLP(3, 8, activation="silu")
    >>> layer(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    >>> sorted(layer.state_dict())
    ['down_proj.weight', 'gate_proj.weight', 'up_proj.weight']
    """

    __prepare_scriptable__ = script_layer

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = False,
        activation: str = "silu",
        *,
        stacked: str | None = None,
        names: tuple[str, ...] | None = None,
        dropout: float = 0.0,
        recompute: int | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        activation_of(activation, _NAME, OTHER_GATE)
        check_backend(backend, "gated_mlp", _NAME)
        n = in_features if out_features is None else out_features
        sizes = {"in_features": in_features, "hidden_features": hidden_features}
        check_made(_NAME, dtype, **sizes, out_features=n)
        _check_recompute("", recompute)
        if stacked is not None and stacked not in STACKED:
            _fail(
                "",
                f"stacked in {', '.join(map(repr, STACKED))} or None",
                repr(stacked),
                "It says how gate and up lie in one layer.",
            )
        if not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
            _fail("", "a dropout rate in [0, 1)", repr(dropout), "0.0 drops nothing.")
        if names is None:
            names = ("gate_proj", "up_proj") if stacked is None else ("gate_up_proj",)
            names = (*names, "down_proj")
        wanted = 3 if stacked is None else 2
        fit = isinstance(names, tuple | list) and len(names) == wanted == len(set(names))
        if not fit or not all(isinstance(n, str) and n and "." not in n for n in names):
            _fail(
                "",
                "three different names, or two with stacked, of modules in a module",
                repr(names),
                "They are of the gate, the up and the down projection, or of gate and up together "
                "and of the down projection.",
            )
        _check_free("", names)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        first = hidden_features if stacked is None else 2 * hidden_features
        for name in names[:-1]:
            self.add_module(name, nn.Linear(in_features, first, bias, **made))
        self.add_module(names[-1], nn.Linear(hidden_features, n, bias, **made))
        up = names[1] if stacked is None else None
        self.gated = Gated(names[0], up, names[-1], stacked or "apart", activation, dropout)
        self.recompute, self.backend = recompute, backend

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) → (..., N)."""
        gated = self.gated
        found = plain_weights(self, gated)
        if found is None:
            return self._by_layers(x)
        weights, biases = found
        options = gated.activation, gated.order, self.recompute, self.backend
        gate, up, down = weights
        dropping = gated.dropout and self.training
        if down is None:
            return call(x, weights, biases, *options, "gated_linear")
        if not dropping and down.dtype == gate.dtype:
            return call(x, weights, biases, *options)
        h = call(x, (gate, up, None), (*biases[:2], None), *options, "gated_linear")
        if dropping:
            h = F.dropout(h, gated.dropout, True)
        h = h.to(down.dtype)
        if asked(self.backend) == BATCH_INVARIANT:
            return linear(h, down, biases[2], "none", BATCH_INVARIANT)  # type: ignore[no-any-return]
        return F.linear(h, down, biases[2])

    def _by_layers(self, x: Tensor) -> Tensor:
        """The same by calls of the layers, which do more than nn.Linear does."""
        gated, layers = self.gated, self._modules
        if asked(self.backend) == BATCH_INVARIANT:
            raise not_invariant(_NAME, "one of layers with hooks or adapters")
        for name in gated.names:
            if layers.get(name) is None:
                _fail(
                    ".forward",
                    f"the layers {', '.join(map(repr, gated.names))}",
                    f"{name!r} set to None" if name in layers else f"no {name!r}",
                    "A layer may be replaced by another module of its sizes, but not taken away.",
                )
        up = None if gated.up is None else layers[gated.up](x)  # type: ignore[misc]
        gate, up = split_pre((layers[gated.gate](x), up), gated.order)  # type: ignore[misc]
        h: Tensor = activation_of(gated.activation).value(gate) * up
        if gated.down is None:
            return h
        h = F.dropout(h, gated.dropout, self.training)
        down = layers[gated.down]
        y: Tensor = down(h if type(down) not in PLAIN else h.to(down.weight.dtype))  # type: ignore[misc, union-attr, arg-type]
        return y

    @classmethod
    def from_module(
        cls, module: nn.Module, *, recompute: int | None = None, backend: str | None = None
    ) -> GatedMLP:
        """A layer on the linear layers of a module that computes a gated MLP: the same layers under
        the same names, so that the ``state_dict`` keeps its keys.

        What the module computes is recognised as ``optimize_`` does, whatever its class: in the
        trace of its forward, and on a copy of it with other numbers. The MLPs of Llama, Mistral,
        Qwen, Gemma and Phi-3 in transformers are such modules.

        Raises InputError where it computes anything else, cannot be traced, or has hooks or further
        state.

        >>> import torch, fastlinear as fl
        >>> class MLP(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w1, self.w3 = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)
        ...         self.w2 = torch.nn.Linear(6, 4)
        ...     def forward(self, x):
        ...         return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))
        >>> fl.nn.GatedMLP.from_module(MLP()).gated.names
        ('w1', 'w3', 'w2')
        """
        if not isinstance(module, nn.Module):
            _fail(".from_module", "a module", type(module).__name__, "Pass the MLP itself.")
        check_backend(backend, "gated_mlp", f"{_NAME}.from_module")
        _check_recompute(".from_module", recompute)
        if is_hooked(module):
            _fail(
                ".from_module",
                "a module without hooks of its own, which the new one would not have",
                f"a {type(module).__name__} with hooks",
                "Remove them, convert, and register them on the result.",
            )
        _check_free(".from_module", [n for n, m in module._modules.items() if type(m) in PLAIN])
        found = recognised(Gated, module)
        if isinstance(found, str):
            _fail(
                ".from_module",
                "a module that computes act(gate(x)) * up(x), and down() of it, on plain nn.Linear "
                "children without hooks",
                f"{type(module).__name__}: {found}",
                "Call fastlinear.gated_mlp on its parameters.",
            )
        if found.dropout and len({m.training for m in module.modules()}) > 1:
            _fail(
                ".from_module",
                "a module that is in training as a whole, or not at all",
                f"a {type(module).__name__} with parts in another mode, and a dropout",
                "Call train() or eval() on it before.",
            )
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        for name, child in module._modules.items():
            if name in found.names:
                made.add_module(name, child)
        made.gated, made.recompute, made.backend = found, recompute, backend
        return made.train(module.training)

    def extra_repr(self) -> str:
        """Activation, order, and what else is not in the linear layers."""
        gated = self.gated
        order = "" if gated.order == "apart" else f", stacked={gated.order!r}"
        rate = f", dropout={gated.dropout}" if gated.dropout else ""
        return f"activation={gated.activation!r}{order}{rate}"


def _check_recompute(where: str, recompute: object) -> None:
    if recompute is not None and (type(recompute) is not int or recompute not in (0, 1)):
        _fail(
            where,
            "recompute to be 0, 1 or None",
            repr(recompute),
            "0 keeps the pre-activations for the backward, 1 keeps x alone.",
        )


def _check_free(where: str, names: Iterable[str]) -> None:
    """The layers become attributes, which must not hide those of the module itself."""
    taken = [n for n in names if hasattr(GatedMLP, n) or n in _OWN]
    if taken:
        _fail(
            where,
            "names of linear layers that are no attributes of the new module",
            ", ".join(map(repr, taken)),
            "Rename the layers, or call fastlinear.gated_mlp on their parameters.",
        )


def _fail(where: str, expected: str, received: str, remedy: str) -> NoReturn:
    raise InputError(f"{_NAME}{where}", expected, received, remedy)
