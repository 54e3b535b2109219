"""What the arguments of diagonal_linear must satisfy, and what to say when they do not."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.calls import transforms_active
from fastlinear.core.errors import InputError
from fastlinear.core.tensor_kinds import unlike_strided
from fastlinear.op.checks import check_backend, check_dtype, check_like, check_tensor

_NAME = "diagonal_linear"


def validate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Raise InputError unless the arguments fit each other."""
    activation_of(activation, _NAME)
    check_backend(_NAME, backend)
    optional = [("bias", bias), ("residual", residual)]
    given = [("weight", weight), *((n, t) for n, t in optional if t is not None)]
    for name, value in (("x", x), *given):
        check_tensor(_NAME, name, value)
    if weight.dim() != 1:
        full = "A full matrix goes with linear_act; its diagonal is weight.diagonal()."
        remedy = full if weight.dim() == 2 else "Give one number a feature."
        _fail("weight of shape (K,)", f"shape {tuple(weight.shape)}", remedy)
    k = weight.shape[0]
    if x.dim() == 0 or x.shape[-1] != k:
        remedy = "Make x's last dimension equal weight's."
        _fail(f"x of shape (..., {k}) for weight ({k},)", f"shape {tuple(x.shape)}", remedy)
    if bias is not None and bias.shape != (k,):
        remedy = "Give one number a feature, or None."
        _fail(f"bias of shape ({k},) as weight has", f"shape {tuple(bias.shape)}", remedy)
    if residual is not None and residual.shape != x.shape:
        remedy = "Expand it to x's shape first, or add it to the result."
        _fail(f"residual of x's shape {tuple(x.shape)}", f"shape {tuple(residual.shape)}", remedy)
    check_dtype(_NAME, x)
    for name, value in given:
        check_like(_NAME, name, value, x)


def validate_out(
    out: Tensor,
    x: Tensor,
    dtype: torch.dtype | None,
    inputs: tuple[Tensor | None, ...],
) -> None:
    """Raise InputError unless the result for x fits into ``out`` without touching an input.

    Args:
        out: the caller's tensor.
        x: the input.
        dtype: dtype of the result.
        inputs: every tensor that is read, x included.
    """
    # tensors have no addresses where they are traced or batched
    addressed = not torch.compiler.is_compiling() and not transforms_active()
    if not isinstance(out, torch.Tensor):
        _fail("out to be a tensor", type(out).__name__, "Leave it out for a new one.")
    for t in (out, *inputs) if addressed else ():
        odd = None if t is None else unlike_strided(t)
        if odd is not None:
            name = "out" if t is out else "every input of a call with out="
            _fail(f"{name} to be a strided tensor", odd, "Leave out= away, or convert it first.")
    if (out.shape, out.dtype, out.device) != (x.shape, dtype, x.device):
        expected = f"out of shape {tuple(x.shape)}, {dtype} on {x.device}"
        received = f"shape {tuple(out.shape)}, {out.dtype} on {out.device}"
        _fail(expected, received, "Make it with torch.empty_like(x).")
    if not out.is_contiguous():
        remedy = "Make it with torch.empty(x.shape, dtype=x.dtype, device=x.device)."
        _fail("a contiguous out", f"strides {out.stride()}", remedy)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (out, *inputs)):
        remedy = "Call it under torch.no_grad(), or leave out= away."
        _fail("no gradients with out=", "a tensor that requires grad", remedy)
    if _meets(out, inputs) if addressed and not out.is_meta else any(out is t for t in inputs):
        remedy = "Give out memory of its own."
        _fail("out apart from every input", "memory that an input lies in", remedy)


def _meets(out: Tensor, inputs: tuple[Tensor | None, ...]) -> bool:
    """Whether the address range of a contiguous tensor meets that of any other."""
    low, high = _range(out)
    for t in inputs:
        if t is not None and (start := t.data_ptr()) < high:
            end = start + t.nbytes if t.is_contiguous() else _range(t)[1]
            if low < end:
                return True
    return False


def _range(t: Tensor) -> tuple[int, int]:
    if t.numel() == 0:
        return 0, 0
    start = t.data_ptr()
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return start, start + (last + 1) * t.element_size()


def _fail(expected: str, received: str, remedy: str) -> NoReturn:
    raise InputError(_NAME, expected, received, remedy)
