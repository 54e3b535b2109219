"""The Problem of one mlp call, and its widths read back from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.problem import Problem
from fastlinear.dispatch.space import Space
from fastlinear.families.linear import problem as linear_act

NAME = "mlp"
PIECES = ("forward", "backward")
STEP = "step"
LOOPS = ("eager", "layerwise")
"""Backends that run one layer after the other, and so have the outputs of hidden ones."""
_HIDDEN = ("hidden", "kept")


def problem(
    piece: str,
    m: int,
    widths: Sequence[int],
    *,
    dtype: str,
    device: str,
    activation: str = "relu",
    final_activation: str = "none",
    bias: str = "yes",
    needs_grad: bool = False,
    x_layout: str = "rows",
    w_layout: str = "nk",
    hidden: bool = False,
    precision: str = "n/a",
    captured: bool = False,
) -> Problem:
    """An mlp Problem: M rows of x through layers of ``widths`` n_0, n_1, … n_L.

    Args:
        bias: ``"yes"`` (every layer has one), ``"no"`` or ``"some"``.
        x_layout: as in linear_act: ``"rows"``, ``"rows_odd"`` or ``"strided"``; or ``"pitched"``,
            rows that begin on 16 bytes, though what is in one is no multiple of 16.
        w_layout: ``"nk"`` (every weight contiguous, as in nn.Linear) or ``"mixed"``.
        hidden: of a backward, whether the outputs of hidden layers are kept for it, where it would
            compute them again.
    """
    layers = len(widths) - 1
    widest = max(widths[1:-1]) if layers > 1 else widths[-1]
    equal = len(set(widths)) == 1
    options = (
        ("widths", "equal" if equal else "-".join(map(str, widths))),
        ("activation", activation),
        ("final", final_activation),
        ("bias", bias),
        ("x", x_layout),
        ("w", w_layout),
    )
    dims = (("M", m), ("L", layers), ("K", widths[0]), ("H", widest), ("N", widths[-1]))
    made = Problem(NAME, piece, dims, dtype, device, options, needs_grad, precision, captured)
    return backward_of(made, LOOPS[0]) if hidden else made


def backward_of(p: Problem, forward: str) -> Problem:
    """The backward's Problem behind a backend of the forward, which may keep outputs for it."""
    loop = forward in LOOPS and p.dim("L") > 1
    again = loop and activation_of(p.option("activation")).saved == "pre"
    return replace(p, options=(*p.options, _HIDDEN)) if again else p


def keeps_hidden(p: Problem) -> bool:
    """Whether outputs of hidden layers are kept for this backward."""
    return _HIDDEN in p.options


SPACE = Space(
    problem,
    sizes=(
        *((1, (16, 16, 16)), (7, (33, 65, 17)), (70, (64, 64, 64, 64))),
        *((1, (7, 33)), (5, (1, 20, 3, 9)), (33, (65, 40, 31))),
    ),
    options={
        "activation": ACTIVATIONS,
        "final_activation": ACTIVATIONS,
        "bias": ("yes", "yes", "no", "some"),
        "needs_grad": (True, False),
        "x_layout": ("rows", "rows", "strided"),
        "w_layout": ("nk", "nk", "mixed"),
    },
    narrowed={"backward": {"hidden": (False, False, True)}},
    times=4,
    times_on_cuda=2,
)


def x_layout_of(rows: Tensor) -> str:
    """The x layout of ``problem`` for x seen as its rows (M, n_0), by strides alone."""
    found, k = linear_act.x_layout_of(rows), rows.shape[1]
    apart = rows.shape[0] > 1 and rows.stride(0) != k
    return "pitched" if found == "rows" and apart and k * rows.itemsize % 16 else found


def linear_x_layout(p: Problem) -> str:
    """What linear_act's Problems call the x layout of an mlp Problem."""
    return "rows" if p.option("x") == "pitched" else p.option("x")


def widths_of(p: Problem) -> tuple[int, ...]:
    """n_0, n_1, … n_L of an mlp Problem."""
    widths = p.option("widths")
    if widths == "equal":
        return (p.dim("K"),) * (p.dim("L") + 1)
    return tuple(map(int, widths.split("-")))


def activations_of(p: Problem) -> tuple[str, ...]:
    """The activation of each layer, first to last."""
    return layer_activations(p.dim("L"), p.option("activation"), p.option("final"))


def layer_activations(layers: int, activation: str, final_activation: str) -> tuple[str, ...]:
    """``activation`` for every layer but the last, ``final_activation`` for that."""
    return (activation,) * (layers - 1) + (final_activation,)
