"""The Problem of one unequal_linear call: how many groups, and their sizes on average."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.core.calls import facts_of
from fastlinear.core.problem import Problem
from fastlinear.dispatch.space import Space
from fastlinear.families.grouped.problem import SIZES, STEP, bits

NAME = "unequal_linear"


def problem(
    piece: str,
    m: int,
    groups: int,
    k: int,
    n: int,
    weights: int | None = None,
    *,
    dtype: str,
    device: str,
    activation: str = "none",
    bias: str = "yes",
    needs_grad: bool = False,
    rows: str = "aligned",
    numbers: str = "32",
    precision: str = "n/a",
    captured: bool = False,
) -> Problem:
    """An unequal_linear Problem: M rows of all groups, of on average K in and N out features.

    Args:
        weights: numbers of a group's weight on average; K·N by default.
        bias: ``"yes"``, ``"no"``, or ``"some"`` where a part of the groups has one.
        rows: ``"aligned"`` where all features are multiples of eight, else ``"unaligned"``.
        numbers: ``"32"`` or ``"64"``: bits that the count of a matrix's numbers needs.
    """
    options = (("activation", activation), ("bias", bias), ("rows", rows), ("numbers", numbers))
    dims = (("M", m), ("G", groups), ("K", k), ("N", n), ("KN", weights or k * n))
    return Problem(NAME, piece, dims, dtype, device, options, needs_grad, precision, captured)


SPACE = Space(
    problem,
    sizes=SIZES,
    options={
        "activation": ACTIVATIONS,
        "bias": ("yes", "no", "some"),
        "rows": ("aligned", "unaligned"),
    },
    times=3,
)


def problem_of(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    activation: str,
    needs_grad: bool,
) -> Problem:
    """The Problem that decides about a call whose arguments are valid."""
    given = {b is not None for b in biases or (None,)}
    return problem(
        STEP if needs_grad else "forward",
        sum(x.shape[:-1].numel() for x in xs),
        len(xs),
        _mean([w.shape[1] for w in weights]),
        _mean([w.shape[0] for w in weights]),
        _mean([w.numel() for w in weights]),
        activation=activation,
        bias="some" if len(given) == 2 else "yes" if given == {True} else "no",
        needs_grad=needs_grad,
        rows="aligned" if all(n % 8 == 0 for w in weights for n in w.shape) else "unaligned",
        numbers=bits(max(t.numel() for t in (*xs, *weights))),
        **facts_of(xs[0]),
    )


def _mean(sizes: Sequence[int]) -> int:
    return -(-sum(sizes) // len(sizes))
