"""The readable torch-only oracle of mlp: what every backend must compute.

In float64 it is the oracle; in the caller's dtype it is PyTorch's own path (backend ``eager``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.families.mlp.problem import layer_activations

Weights = tuple[Tensor, ...]
Biases = tuple[Tensor | None, ...]
Needs = tuple[bool, tuple[bool, ...], tuple[bool, ...]]


def mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
    final_activation: str,
) -> Tensor:
    """The chain by differentiable torch ops; x (..., n_0), weight i (n_{i+1}, n_i) → (..., n_L)."""
    names = layer_activations(len(weights), activation, final_activation)
    h = x
    for weight, bias, name in zip(weights, biases, names, strict=True):
        h = activation_of(name).value(F.linear(h, weight, bias))
    return h


def forward(
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    final_activation: str,
    save: bool,
    hidden: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(y, saved): x (M, n_0) → y (M, n_L) and, if asked, what the backward of each layer reads.

    saved[i] (M, n_{i+1}) is layer i's pre-activation where its derivative is computed from that,
    else the layer's output; the last layer's output is y itself. With ``hidden`` the outputs of
    all hidden layers follow, whose pre-activations are kept: the backward does not compute them
    again. It takes None for those that it does not read.
    """
    saved, outputs = [], []
    h = x
    names = layer_activations(len(weights), activation, final_activation)
    for weight, bias, name in zip(weights, biases, names, strict=True):
        act = activation_of(name)
        pre = F.linear(h, weight, bias)
        kept = save and act.saved == "pre"
        h = act.value(pre) if kept else act.over(pre)
        saved.append(pre if kept else h)
        outputs.append(h)
    return h, (*saved, *(outputs[:-1] if hidden else ())) if save else ()


def backward(
    dy: Tensor,
    x: Tensor,
    weights: Weights,
    saved: tuple[Tensor, ...],
    activation: str,
    final_activation: str,
    needs: Needs,
) -> tuple[Tensor | None, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """(dx, dWs, dbs), each None where not needed; dy (M, n_L), saved as ``forward`` gives it."""
    need_x, need_ws, need_bs = needs
    names = layer_activations(len(weights), activation, final_activation)
    dws: list[Tensor | None] = [None] * len(weights)
    dbs: list[Tensor | None] = [None] * len(weights)
    dh: Tensor | None = dy
    first = first_needed(needs)
    for i in reversed(range(first, len(weights))):
        assert dh is not None
        act = activation_of(names[i])
        dpre = dh if act.saved == "none" else act.backward(dh, saved[i])
        if need_bs[i]:
            dbs[i] = dpre.sum(0)
        if need_ws[i]:
            dws[i] = dpre.t() @ layer_input(i, x, saved, names)
        dh = dpre @ weights[i] if i > first or need_x else None
    return (dh if need_x else None), tuple(dws), tuple(dbs)


def first_needed(needs: Needs) -> int:
    """The first layer the backward must reach; the number of layers when none is needed."""
    need_x, need_ws, need_bs = needs
    if need_x:
        return 0
    wanted = (i for i, (w, b) in enumerate(zip(need_ws, need_bs, strict=True)) if w or b)
    return next(wanted, len(need_ws))


def layer_input(i: int, x: Tensor, saved: tuple[Tensor, ...], names: tuple[str, ...]) -> Tensor:
    """h_i (M, n_i): layer i's input, recomputed where only its pre-activation was kept."""
    if i == 0:
        return x
    act = activation_of(names[i - 1])
    if act.saved != "pre":
        return saved[i - 1]
    given = kept_input(i, saved, len(names))
    return act.value(saved[i - 1]) if given is None else given


def kept_input(i: int, saved: tuple[Tensor, ...], layers: int) -> Tensor | None:
    """What the hidden layer before layer ``i`` gave, where it is kept beside a pre-activation."""
    return saved[layers + i - 1] if len(saved) > layers else None
