"""Backend ``gemm_cpp`` on the CPU: our own products.

float32: with a pass for bias and activation. On AMD's processors neither MKL's nor oneDNN's
products of some dozens of rows reach the rate of large ones. On Intel's MKL does, and these are no
faster. bfloat16: those of one group of ``grouped_linear``, which cost no such pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import about_to_run
from fastlinear.families.linear import reference
from fastlinear.kernels.cpu import elementwise, gemm, grouped
from fastlinear.native import cpp_build


def reason_not(problem: Problem) -> str | None:
    """Why it cannot serve a Problem of a piece with a product, or None. Compiles nothing."""
    if problem.device != "cpu":
        return "compiled for the CPU only"
    if problem.dtype == "bfloat16":
        return _why_no_half()
    if problem.dtype != "float32":
        return f"float32 and bfloat16 only, not {problem.dtype}"
    return gemm.reason_not() or elementwise.reason_not()


def _why_no_half() -> str | None:
    if grouped.half_products() is None:
        return grouped.NO_HALF
    why = grouped.why_no_vectors() or cpp_build.reason_not() or cpp_build.failed(grouped.SOURCE)
    if why is None and about_to_run.get() and not grouped.serves(torch.bfloat16):
        return grouped.NO_HALF  # the compiler knows no such products
    return why


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """act(x Wᵀ + b): x (M, K), weight (N, K), bias (N,) or None → (y (M, N), pre (M, N) or None).

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    if x.dtype is torch.bfloat16:
        return _half_forward(x, weight, bias, activation, save_pre)
    pre = gemm.product(_readable(x), _readable(weight.t()))
    kept = pre if save_pre else None
    if activation == "none" and bias is None:
        return pre, kept
    if bias is None and activation == "tanh":  # torch's own is the faster one
        return torch.tanh(pre) if save_pre else torch.tanh_(pre), kept
    y = torch.empty_like(pre) if save_pre else pre
    if bias is None:
        elementwise.activate(activation, pre, y)
        return y, kept
    first = "none" if activation == "tanh" else activation
    elementwise.activate_with_bias(first, pre, bias.contiguous(), y, kept)
    return torch.tanh_(y) if activation == "tanh" else y, kept


def grad_input(dpre: Tensor, weight: Tensor) -> Tensor:
    """dx (M, K) = dpre (M, N) @ weight (N, K)."""
    if dpre.dtype is torch.bfloat16:
        return _half_forward(dpre, weight.t(), None, "none", False)[0]
    return gemm.product(_readable(dpre), _readable(weight))


def grad_weight(dpre: Tensor, x: Tensor) -> Tensor:
    """dW (N, K) = dpreᵀ (N, M) @ x (M, K)."""
    if dpre.dtype is torch.bfloat16:
        if not (dpre.numel() and x.numel()):
            return dpre.new_zeros(dpre.shape[1], x.shape[1])
        dw = dpre.new_empty(dpre.shape[1], x.shape[1])
        weight = dw[None]  # of whose shape it is
        grouped.run_backward(
            _as_group(dpre), None, _as_group(x), weight, "none", None, dw[None], None
        )
        return dw
    return gemm.product(_readable(dpre).t(), _readable(x))


def _half_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    if not (x.numel() and weight.numel()):  # nothing to multiply
        return reference.forward(x, weight, bias, activation, save_pre)
    if save_pre and activation_of(activation).saved != "pre":  # such calls keep the result alone
        pre, _ = _half_forward(x, weight, bias, "none", False)
        return pre if activation == "none" else activation_of(activation).value(pre), pre
    y = x.new_empty(x.shape[0], weight.shape[0])
    kept = torch.empty_like(y) if save_pre else None
    lies = None if bias is None else bias.contiguous()[None]
    into = None if kept is None else _as_group(kept)
    grouped.run_forward(_as_group(x), weight[None], lies, activation, _as_group(y), into)
    return y, kept


def _as_group(rows: Tensor) -> Tensor:
    """(M, features) as the tokens of one group, (1, M, 1, features)."""
    return rows[None, :, None]


def _readable(matrix: Tensor) -> Tensor:
    return matrix if gemm.readable(matrix) else matrix.contiguous()
