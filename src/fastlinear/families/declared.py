"""The schemas of every registered op: ``import fastlinear`` declares them and loads no family.

Programs that ``torch.export`` saved, and packages of AOTInductor, name these ops. They may run in a
process that has imported nothing but ``fastlinear``.
"""

from __future__ import annotations

from fastlinear.op.library import declare_eager_op, declare_family


def _linear_act() -> None:
    from fastlinear.families import linear  # noqa: F401


def _mlp() -> None:
    from fastlinear.families import mlp  # noqa: F401


def _gated_mlp() -> None:
    from fastlinear.families import gated  # noqa: F401


def _diagonal_linear() -> None:
    from fastlinear.families import diagonal  # noqa: F401


def _grouped_linear() -> None:
    from fastlinear.families import grouped  # noqa: F401


def _ragged_linear() -> None:
    from fastlinear.families.grouped import ragged  # noqa: F401


def _experts() -> None:
    from fastlinear.families import experts  # noqa: F401


def load_all() -> None:
    """Import every family with registered ops or dispatched backends."""
    layers = _linear_act, _mlp, _gated_mlp, _diagonal_linear
    for load in (*layers, _grouped_linear, _ragged_linear, _experts):
        load()


_LAYER = "Tensor x, Tensor weight, Tensor? bias"
declare_family("linear_act", _LAYER, "str activation", _linear_act, saves=1)
declare_eager_op(
    "linear_act_inference",
    "(Tensor x, Tensor weight, Tensor? bias, bool turned, str activation, str backend) -> Tensor",
    _linear_act,
)
declare_family("grouped_linear", _LAYER, "str activation, str layout", _grouped_linear, saves=1)
declare_family(
    "ragged_linear",
    "Tensor x, Tensor weight, Tensor group_sizes, Tensor? bias",
    "str activation",
    _ragged_linear,
    saves=1,
)
declare_family(
    "diagonal_linear",
    f"{_LAYER}, Tensor? residual",
    "str activation",
    _diagonal_linear,
    saves=0,
)
declare_family(
    "mlp",
    "Tensor x, Tensor[] weights, Tensor[] biases",
    "bool[] has_bias, str activation, str final_activation",
    _mlp,
    saves=None,
)
declare_eager_op(
    "mlp_inference",
    "(Tensor x, Tensor[] weights, Tensor[] biases, bool[] has_bias, bool[] turned, str activation,"
    " str final_activation, str backend) -> Tensor",
    _mlp,
)
declare_family(
    "gated_mlp",
    "Tensor x, Tensor gate_weight, Tensor? up_weight, Tensor? down_weight, Tensor? gate_bias,"
    " Tensor? up_bias, Tensor? down_bias",
    "str activation, str order, bool recompute",
    _gated_mlp,
    saves=2,
)
declare_family(
    "experts",
    "Tensor x, Tensor gate_up, Tensor down, Tensor topk_index, Tensor topk_weight,"
    " Tensor? gate_up_bias, Tensor? down_bias",
    "str activation, str order, str numbers, str first, bool recompute",
    _experts,
    saves=1,
)
