"""What experts accepts, said in one place."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.families.experts.problem import NAME
from fastlinear.families.gated.stacking import STACKED
from fastlinear.op.checks import (
    check_backend,
    check_dense,
    check_device,
    check_dtype,
    check_like,
    check_tensor,
)

BACKENDS = (BATCH_INVARIANT, "cpp", "eager", "triton")
_INTEGERS = (torch.int32, torch.int64)


def validate(
    x: Any,
    weights: tuple[Any, Any],
    routing: tuple[Any, Any, Any, Any],
    activation: Any,
    order: Any,
    *rest: Any,
) -> None:
    """Names are known, and shapes, dtypes and devices fit.

    Args:
        weights: gate_up (E, 2I, H) and down (E, H, I).
        routing: topk_index, topk_weight, gate_up_bias, down_bias.
        rest: the other options of a call, the forced backend last.

    Raises:
        InputError: where they do not.
    """
    activation_of(activation, NAME)
    check_backend(NAME, rest[-1], BACKENDS)
    if not isinstance(order, str) or order not in STACKED:
        fail(
            f"stacked in {', '.join(map(repr, STACKED))}",
            repr(order),
            "It says how gate and up lie in gate_up.",
        )
    names = ("x", "gate_up", "down", "topk_index", "topk_weight", "gate_up_bias", "down_bias")
    named = dict(zip(names, (x, *weights, *routing), strict=True))
    for name, t in named.items():
        if t is not None or not name.endswith("bias"):
            check_tensor(NAME, name, t)
            check_dense(NAME, name, t)
    _check_shapes(**named)
    check_dtype(NAME, x)
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        if named[name] is not None:
            check_like(NAME, name, named[name], x)
    index, weight = routing[:2]
    if index.dtype not in _INTEGERS:
        fail("topk_index of int32 or int64", str(index.dtype), "Convert it: topk_index.long().")
    if weight.dtype not in (x.dtype, torch.float32):
        fail(
            f"topk_weight of x's dtype {x.dtype} or torch.float32",
            str(weight.dtype),
            "Convert it: topk_weight.float().",
        )
    check_device(NAME, "topk_index", index, x)
    check_device(NAME, "topk_weight", weight, x)


def _check_shapes(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_index: Tensor,
    topk_weight: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> None:
    if x.dim() != 2:
        fail("x of shape (T, H)", f"shape {tuple(x.shape)}", "Flatten its tokens: x.flatten(0, 1).")
    tokens, h = x.shape
    if gate_up.dim() != 3 or gate_up.shape[2] != h or gate_up.shape[1] % 2 or not gate_up.shape[0]:
        fail(
            f"gate_up of shape (E, 2I, {h}) for x of shape {tuple(x.shape)}, E at least 1",
            f"shape {tuple(gate_up.shape)}",
            "Weights that lie as (E, H, 2I) and (E, I, H) take transposed=True.",
        )
    experts, both, _ = gate_up.shape
    if down.shape != (experts, h, both // 2):
        fail(
            f"down of shape {(experts, h, both // 2)} for gate_up of shape {tuple(gate_up.shape)}",
            f"shape {tuple(down.shape)}",
            "It takes what the gate lets through, and both lie alike (transposed=).",
        )
    if topk_index.dim() != 2 or topk_index.shape[0] != tokens:
        fail(
            f"topk_index of shape ({tokens}, k) for x of shape {tuple(x.shape)}",
            f"shape {tuple(topk_index.shape)}",
            "Give the experts of each token.",
        )
    if topk_weight.shape != topk_index.shape:
        fail(
            f"topk_weight of topk_index's shape {tuple(topk_index.shape)}",
            f"shape {tuple(topk_weight.shape)}",
            "Give the weight of each choice: scores.gather(1, topk_index).",
        )
    for name, bias, size in (("gate_up", gate_up_bias, both), ("down", down_bias, h)):
        if bias is not None and bias.shape != (experts, size):
            fail(
                f"{name}_bias of shape ({experts}, {size})",
                f"shape {tuple(bias.shape)}",
                f"Give one number for each out feature of {name}, or None.",
            )


def fail(expected: str, received: str, remedy: str) -> NoReturn:
    """Raise what a call that does not fit gets."""
    raise InputError(NAME, expected, received, remedy)
