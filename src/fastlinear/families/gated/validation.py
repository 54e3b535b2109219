"""What the arguments of gated_linear and gated_mlp must satisfy, and what to say if they do not."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError
from fastlinear.families.gated.stacking import ORDERS, STACKED
from fastlinear.op.checks import check_backend, check_dtype, check_like, check_tensor

KINDS = ("gate", "up", "down")
OTHER_GATE = (
    "For any other, multiply by the gate yourself: act(F.linear(x, gate_weight, gate_bias)) * "
    "fastlinear.linear_act(x, up_weight, up_bias)."
)


def validate(
    function: str,
    x: Tensor,
    weights: tuple[Any, Any, Any],
    biases: tuple[Any, Any, Any],
    activation: str,
    order: str,
    backend: str | None,
) -> None:
    """Raise InputError unless the arguments fit each other.

    Args:
        function: ``"gated_linear"``, which has no down projection, or ``"gated_mlp"``.
        weights, biases: gate, up and down, as the function was given them.
        order: ``"apart"`` where ``stacked`` was None.
    """
    check = _Check(function)
    activation_of(activation, function, OTHER_GATE)
    if not isinstance(order, str) or order not in ORDERS:
        check.fail(
            f"stacked in {', '.join(map(repr, STACKED))} or None",
            repr(order),
            "It says how gate and up lie in gate_weight; leave it out where they are two tensors.",
        )
    check_backend(function, backend)
    check.tensors(x, weights, biases, order)
    check.shapes(x, weights, biases, order)
    check.like_x(x, weights, biases)


class _Check:
    """The checks of one call; ``function`` is named in every message."""

    def __init__(self, function: str) -> None:
        self.function = function

    def fail(self, expected: str, received: str, remedy: str) -> NoReturn:
        raise InputError(self.function, expected, received, remedy)

    def tensors(
        self, x: Any, weights: tuple[Any, ...], biases: tuple[Any, ...], order: str
    ) -> None:
        """Which arguments must be tensors, and which None."""
        stacked = order != "apart"
        wanted: list[tuple[str, Any]] = [("x", x), ("gate_weight", weights[0])]
        if stacked:
            for name, value in (("up_weight", weights[1]), ("up_bias", biases[1])):
                if value is not None:
                    self.fail(
                        f"no {name} with stacked={order!r}",
                        type(value).__name__,
                        f"The stack is gate_{name[3:]}; leave {name} out, or leave stacked out.",
                    )
        elif weights[1] is None:
            self.fail(
                "up_weight to be a tensor",
                "None",
                f"Name how gate and up lie in gate_weight: stacked in {', '.join(STACKED)}.",
            )
        else:
            wanted.append(("up_weight", weights[1]))
        if self.function == "gated_mlp":
            if weights[2] is None:
                self.fail(
                    "down_weight to be a tensor",
                    "None",
                    "Without a down projection it is fastlinear.gated_linear.",
                )
            wanted.append(("down_weight", weights[2]))
        for kind, value in zip(KINDS, biases, strict=True):
            if value is not None:
                wanted.append((f"{kind}_bias", value))
        for name, value in wanted:
            check_tensor(self.function, name, value)

    def shapes(
        self, x: Tensor, weights: tuple[Any, ...], biases: tuple[Any, ...], order: str
    ) -> None:
        """x (..., K), gate and up (H, K) or stacked (2H, K), down (N, H), biases to match."""
        gate, up, down = weights
        for kind, value in zip(KINDS, weights, strict=True):
            if value is not None and value.dim() != 2:
                self.fail(
                    f"{kind}_weight with two dimensions, as nn.Linear has it",
                    f"shape {tuple(value.shape)}",
                    "Pass the matrix of one layer.",
                )
        if x.dim() < 1:
            self.fail("x of at least one dimension", "shape ()", "Add the feature dimension.")
        rows, k = gate.shape
        if x.shape[-1] != k:
            turned = " The weight looks transposed." if x.shape[-1] == rows else ""
            self.fail(
                f"x with {k} features for gate_weight of shape {tuple(gate.shape)}",
                f"shape {tuple(x.shape)}",
                f"Make x fit the weight, or the weight x.{turned}",
            )
        hidden = rows
        if order != "apart":
            if rows % 2:
                self.fail(
                    "a stacked gate_weight with an even number of rows, 2H",
                    f"shape {tuple(gate.shape)}",
                    "Half of its rows are the gate's, half of them the up projection's.",
                )
            hidden = rows // 2
        elif up.shape != gate.shape:
            self.fail(
                f"up_weight of gate_weight's shape {tuple(gate.shape)}",
                f"shape {tuple(up.shape)}",
                "Gate and up have the same number of hidden features.",
            )
        if down is not None and down.shape[1] != hidden:
            turned = " The weight looks transposed." if down.shape[0] == hidden else ""
            self.fail(
                f"down_weight of shape (N, {hidden}) for {hidden} hidden features",
                f"shape {tuple(down.shape)}",
                f"It takes what the gate lets through.{turned}",
            )
        sizes = (rows, hidden, 0 if down is None else down.shape[0])
        for kind, value, size in zip(KINDS, biases, sizes, strict=True):
            if value is not None and tuple(value.shape) != (size,):
                both = " (gate and up stacked)" if kind == "gate" and order != "apart" else ""
                self.fail(
                    f"{kind}_bias of shape ({size},){both}",
                    f"shape {tuple(value.shape)}",
                    f"Give one number per row of the {kind} weight, or None.",
                )

    def like_x(self, x: Tensor, weights: tuple[Any, ...], biases: tuple[Any, ...]) -> None:
        """One dtype and one device."""
        check_dtype(self.function, x)
        named = [(f"{kind}_weight", t) for kind, t in zip(KINDS, weights, strict=True)]
        named += [(f"{kind}_bias", t) for kind, t in zip(KINDS, biases, strict=True)]
        for name, value in named:
            if value is not None:
                check_like(self.function, name, value, x)
