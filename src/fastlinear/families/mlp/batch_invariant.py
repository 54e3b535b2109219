"""Backend ``batch_invariant`` of mlp: one layer after the other, each so that its rows do not
depend on each other."""

from __future__ import annotations

from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.families.linear import batch_invariant as layers
from fastlinear.families.mlp.problem import layer_activations
from fastlinear.families.mlp.reference import Biases, Weights

reason_not = layers.reason_not


def forward(
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    final_activation: str,
    save: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(y, saved): x (M, n_0) → y (M, n_L); saved as in ``reference.forward``."""
    names = layer_activations(len(weights), activation, final_activation)
    saved: list[Tensor] = []
    h = x
    for weight, bias, name in zip(weights, biases, names, strict=True):
        kept = save and activation_of(name).saved == "pre"
        bias = None if bias is None else bias.contiguous()
        h, pre = layers.forward(h, weight, bias, name, kept)
        saved.append(h if pre is None else pre)
    return h, tuple(saved) if save else ()
