"""The schemas of every registered op: ``import fastlinear`` declares them and loads no family.

Programs that ``torch.export`` saved, and packages of AOTInductor, name these ops. They may run in a
process that has imported nothing but ``fastlinear``.
"""

from __future__ import annotations

from collections.abc import Callable

from fastlinear.op.library import declare_eager_op, declare_op


def _linear_act() -> None:
    from fastlinear.ops import linear_act  # noqa: F401


def _mlp() -> None:
    from fastlinear.ops import mlp  # noqa: F401


def _gated_mlp() -> None:
    from fastlinear.ops import gated_mlp  # noqa: F401


def _diagonal_linear() -> None:
    from fastlinear.ops import diagonal_linear  # noqa: F401


def _grouped_linear() -> None:
    from fastlinear.ops import grouped_linear  # noqa: F401


def _ragged_linear() -> None:
    from fastlinear.ops import ragged_linear  # noqa: F401


def load_all() -> None:
    """Import every family with registered ops or dispatched backends."""
    for load in (_linear_act, _mlp, _gated_mlp, _diagonal_linear, _grouped_linear, _ragged_linear):
        load()


_Load = Callable[[], object]


def _declare(name: str, operands: str, options: str, load: _Load, *, saves: bool = True) -> None:
    """The two ops of a family that ``op.registered`` makes."""
    results = "(Tensor, Tensor)" if saves else "Tensor"
    forward = f"({operands}, {options}, bool needs_grad, str backend) -> {results}"
    declare_op(name, forward, load, formula=True)
    given = f"Tensor dy, Tensor? saved, {operands}, {options}, bool[] needs, str backend"
    gradients = ", ".join("Tensor" for _ in operands.split(","))
    declare_op(f"{name}_backward", f"({given}) -> ({gradients})", load, formula=False)


_LAYER = "Tensor x, Tensor weight, Tensor? bias"
_ROWS = "Tensor x, Tensor weight, Tensor group_sizes, Tensor? bias"
_declare("linear_act", _LAYER, "str activation", _linear_act)
_declare("grouped_linear", _LAYER, "str activation, str layout", _grouped_linear)
_declare("ragged_linear", _ROWS, "str activation", _ragged_linear)
_declare(
    "diagonal_linear",
    f"{_LAYER}, Tensor? residual",
    "str activation",
    _diagonal_linear,
    saves=False,
)

_GATED = (
    "Tensor x, Tensor gate_weight, Tensor? up_weight, Tensor? down_weight, Tensor? gate_bias,"
    " Tensor? up_bias, Tensor? down_bias, str activation, str order"
)
declare_eager_op(
    "linear_act_inference",
    "(Tensor x, Tensor weight, Tensor? bias, bool turned, str activation, str backend) -> Tensor",
    _linear_act,
)
declare_op(
    "mlp",
    "(Tensor x, Tensor[] weights, Tensor[] biases, bool[] has_bias, str activation,"
    " str final_activation, bool needs_grad, str backend) -> (Tensor, Tensor[])",
    _mlp,
    formula=True,
)
declare_op(
    "mlp_backward",
    "(Tensor dy, Tensor x, Tensor[] weights, Tensor[] saved, str activation,"
    " str final_activation, bool needs_x, bool[] needs_w, bool[] needs_b, str backend)"
    " -> (Tensor, Tensor[], Tensor[])",
    _mlp,
    formula=False,
)
declare_eager_op(
    "mlp_inference",
    "(Tensor x, Tensor[] weights, Tensor[] biases, bool[] has_bias, bool[] turned, str activation,"
    " str final_activation, str backend) -> Tensor",
    _mlp,
)
declare_op(
    "gated_mlp",
    f"({_GATED}, bool recompute, bool needs_grad, str backend) -> (Tensor, Tensor, Tensor)",
    _gated_mlp,
    formula=True,
)
declare_op(
    "gated_mlp_backward",
    f"(Tensor dy, Tensor? first, Tensor? second, {_GATED}, bool[] needs, str backend)"
    f" -> ({', '.join(['Tensor'] * 7)})",
    _gated_mlp,
    formula=False,
)
