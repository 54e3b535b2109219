"""The Problem of one experts call. Which token goes to which expert is no fact of it."""

from __future__ import annotations

from torch import Tensor

from fastlinear.core.calls import facts_of
from fastlinear.core.problem import Problem
from fastlinear.dispatch.space import Space
from fastlinear.families.experts.reference import has_grouped_product
from fastlinear.families.gated.stacking import STACKED
from fastlinear.families.grouped.problem import STEP, bits

NAME = "experts"
PIECES = ("forward", STEP)


def problem(
    piece: str,
    m: int,
    experts: int,
    top: int,
    h: int,
    i: int,
    *,
    dtype: str,
    device: str,
    activation: str = "silu",
    bias: str = "no",
    needs_grad: bool = False,
    order: str = "gate_up",
    clamped: bool = False,
    recompute: bool = False,
    layout: str = "nk",
    strides: str = "32",
    sizes: str = "host",
    precision: str = "n/a",
    captured: bool = False,
) -> Problem:
    """An experts Problem: M tokens of H features, each to ``top`` of E experts with I hidden ones.

    Args:
        bias: ``"yes"``, ``"no"`` or ``"some"``.
        order: how gate and up lie, a name in ``stacking.STACKED``.
        clamped: whether the gate has a limit.
        recompute: whether a training call keeps x alone.
        layout: of gate_up: ``"nk"`` where a feature's weights lie together, else ``"kn"``.
        strides: ``"32"`` or ``"64"``: bits that numbers of elements need.
        sizes: where PyTorch's products read the rows of each expert: ``"host"`` or ``"device"``.
    """
    options = (
        ("activation", activation),
        ("bias", bias),
        ("order", order),
        ("clamped", "yes" if clamped else "no"),
        ("recompute", "yes" if recompute else "no"),
        ("layout", layout),
        ("strides", strides),
        ("sizes", sizes),
    )
    dims = (("M", m), ("E", experts), ("TOP", top), ("H", h), ("I", i))
    return Problem(NAME, piece, dims, dtype, device, options, needs_grad, precision, captured)


SPACE = Space(
    problem,
    sizes=(
        *((1, 1, 1, 1, 1), (7, 3, 2, 20, 5), (40, 5, 2, 24, 48), (3, 8, 4, 65, 33)),
        *((33, 4, 1, 7, 17), (65, 6, 3, 32, 16)),
    ),
    options={
        "activation": ("silu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid", "tanh", "none"),
        "bias": ("yes", "no", "some"),
        "needs_grad": (True, False),
        "order": STACKED,
        "clamped": (True, False),
        "recompute": (False, False, True),
        "layout": ("nk", "kn"),
    },
    narrowed={STEP: {"clamped": (False,)}},  # which side of a limit is rounding's to say
    times=3,
)


def problem_of(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    routing: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    activation: str,
    order: str,
    clamped: bool,
    recompute: bool,
    needs_grad: bool,
) -> Problem:
    """The Problem that decides about a call whose arguments are valid."""
    gate_up, down = weights
    index, _, *biases = routing
    given = sum(b is not None for b in biases)
    slots = index.numel()
    reached = (slots * max(gate_up.shape[1], x.shape[1]), *x.stride(), *x.shape)
    return problem(
        STEP if needs_grad else "forward",
        *(x.shape[0], gate_up.shape[0], index.shape[1], x.shape[1], down.shape[2]),
        activation=activation,
        bias=("no", "some", "yes")[given],
        needs_grad=needs_grad,
        order=order,
        clamped=clamped,
        recompute=recompute and needs_grad,
        layout="kn" if gate_up.stride(2) != 1 else "nk",
        sizes="device" if all(has_grouped_product(x, w) for w in weights) else "host",
        strides=bits(max(*reached, *(n for w in weights for n in (*w.shape, *w.stride())))),
        **facts_of(x),
    )
