"""The Problem of one ragged_linear call. The sizes of the groups are numbers, not facts of it."""

from __future__ import annotations

from torch import Tensor

from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.core.calls import facts_of
from fastlinear.core.problem import Problem
from fastlinear.dispatch.space import Space
from fastlinear.families.grouped.problem import SIZES, STEP, bits

NAME = "ragged_linear"


def problem(
    piece: str,
    m: int,
    groups: int,
    k: int,
    n: int,
    *,
    dtype: str,
    device: str,
    activation: str = "none",
    bias: bool = True,
    needs_grad: bool = False,
    strides: str = "32",
    precision: str = "n/a",
    captured: bool = False,
) -> Problem:
    """A ragged_linear Problem: M rows of all groups, each group with K in and N out features.

    Args:
        strides: ``"32"`` or ``"64"``: bits that x's and the weight's strides need.
    """
    options = (
        ("activation", activation),
        ("bias", "yes" if bias else "no"),
        ("strides", strides),
    )
    dims = (("M", m), ("G", groups), ("K", k), ("N", n))
    return Problem(NAME, piece, dims, dtype, device, options, needs_grad, precision, captured)


SPACE = Space(
    problem,
    sizes=SIZES,
    options={"activation": ACTIVATIONS, "bias": (True, False)},
    times=3,
)


def problem_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    needs_grad: bool,
) -> Problem:
    """The Problem that decides about a call whose arguments are valid."""
    groups, n, k = weight.shape
    return problem(
        STEP if needs_grad else "forward",
        *(x.shape[0], groups, k, n),
        activation=activation,
        bias=bias is not None,
        needs_grad=needs_grad,
        strides=bits(max(*x.shape, *x.stride(), *weight.shape, *weight.stride())),
        **facts_of(x),
    )
