"""The schemas of every registered op: ``import fastlinear`` declares them and loads no family.

Programs that ``torch.export`` saved, and packages of AOTInductor, name these ops. They may run in a
process that has imported nothing but ``fastlinear``.
"""

from __future__ import annotations

from fastlinear.ops._register import declare_eager_op, declare_op


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


_GATED = (
    "Tensor x, Tensor gate_weight, Tensor? up_weight, Tensor? down_weight, Tensor? gate_bias,"
    " Tensor? up_bias, Tensor? down_bias, str activation, str order"
)
declare_op(
    "linear_act",
    "(Tensor x, Tensor weight, Tensor? bias, str activation, bool needs_grad, str backend)"
    " -> (Tensor, Tensor)",
    _linear_act,
    formula=True,
)
declare_op(
    "linear_act_backward",
    "(Tensor dy, Tensor? saved, Tensor x, Tensor weight, str activation, bool has_bias,"
    " bool needs_x, bool needs_weight, bool needs_bias) -> (Tensor, Tensor, Tensor)",
    _linear_act,
    formula=False,
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
declare_op(
    "diagonal_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str activation, bool needs_grad,"
    " str backend) -> Tensor",
    _diagonal_linear,
    formula=True,
)
declare_op(
    "diagonal_linear_backward",
    "(Tensor dy, Tensor x, Tensor weight, Tensor? bias, str activation, bool needs_x,"
    " bool needs_weight, bool needs_bias) -> (Tensor, Tensor, Tensor)",
    _diagonal_linear,
    formula=False,
)
declare_op(
    "grouped_linear",
    "(Tensor x, Tensor weight, Tensor? bias, str activation, str layout, bool needs_grad,"
    " str backend) -> (Tensor, Tensor)",
    _grouped_linear,
    formula=True,
)
declare_op(
    "grouped_linear_backward",
    "(Tensor dy, Tensor? saved, Tensor x, Tensor weight, str activation, str layout,"
    " bool has_bias, bool needs_x, bool needs_weight, bool needs_bias, str backend)"
    " -> (Tensor, Tensor, Tensor)",
    _grouped_linear,
    formula=False,
)
declare_op(
    "ragged_linear",
    "(Tensor x, Tensor weight, Tensor group_sizes, Tensor? bias, str activation, bool needs_grad)"
    " -> (Tensor, Tensor)",
    _ragged_linear,
    formula=True,
)
declare_op(
    "ragged_linear_backward",
    "(Tensor dy, Tensor? saved, Tensor x, Tensor weight, Tensor group_sizes, Tensor? bias,"
    " str activation, bool[] needs) -> (Tensor, Tensor, Tensor)",
    _ragged_linear,
    formula=False,
)
