"""The public explain: which backend a call takes and why, whatever the family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastlinear.core.tensor_kinds import refuse_odd
from fastlinear.dispatch.explain import Explanation
from fastlinear.families import diagonal, experts, gated, grouped, linear, mlp
from fastlinear.families.grouped import ragged, unequal


def explain(
    x: Tensor | Sequence[Tensor],
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    **options: Any,
) -> Explanation:
    """Which backend a call takes, why, and why not each other. Measures nothing.

    Args:
        x, weight, bias: the call's tensors: a matrix explains ``linear_act``, a vector
            ``diagonal_linear``, three dimensions ``grouped_linear``, a sequence of weights (and of
            biases) ``mlp``. Three dimensions with ``group_sizes=`` explain ``ragged_linear``,
            sequences of all three ``unequal_linear``. A matrix with ``up_weight=`` or ``stacked=``
            is a gate's: that explains ``gated_linear``, and with ``down_weight=`` ``gated_mlp``; of
            a training call also what is kept for its backward, in bytes, at each level of
            ``recompute``. Three dimensions with ``topk_index=``, ``topk_weight=`` and ``down=`` are
            the gate_up of ``experts``, and ``bias`` is its gate_up_bias.
        options: the keyword arguments of that function (``activation=``, ``backend=``…), and
            ``needs_grad=`` to explain the training choice or not; by default what the tensors say.

    Raises:
        InputError: the call does not fit, or a tensor is sparse or nested: PyTorch's own ops carry
            such calls where they can.

    >>> import torch, fastlinear as fl
    >>> x, w = torch.ones(2, 3), torch.ones(3, 3)
    >>> [c.problem.family for c in fl.explain(x, w, activation="relu").choices]
    ['linear_act']
    >>> [c.problem.family for c in fl.explain(x, [w, w], activation="relu").choices]
    ['mlp']
    >>> [c.problem.family for c in fl.explain(x, w, up_weight=w, down_weight=w).choices]
    ['gated_mlp']
    """
    refuse_odd("explain", x=x, weight=weight, bias=bias, **options)
    if "topk_index" in options:
        return experts.explain(x, gate_up=weight, gate_up_bias=bias, **options)  # type: ignore[arg-type]
    if "up_weight" in options or "stacked" in options:
        return gated.explain(x, weight, gate_bias=bias, **options)  # type: ignore[arg-type]
    if isinstance(x, list | tuple):
        return unequal.explain(x, weight, bias, **options)  # type: ignore[arg-type]
    if "group_sizes" in options:
        return ragged.explain(x, weight, bias=bias, **options)  # type: ignore[arg-type]
    if isinstance(weight, Tensor) and weight.dim() == 1:
        return diagonal.explain(x, weight, bias, **options)  # type: ignore[arg-type]
    if isinstance(weight, Tensor) and weight.dim() == 3:
        return grouped.explain(x, weight, bias, **options)  # type: ignore[arg-type]
    if isinstance(weight, Tensor) or not hasattr(weight, "__iter__"):
        return linear.explain(x, weight, bias, **options)  # type: ignore[arg-type]
    return mlp.explain(x, weight, bias, **options)  # type: ignore[arg-type]
