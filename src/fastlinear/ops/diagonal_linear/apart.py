"""Calls of diagonal_linear off the hot path: subclasses, transforms, and torch.compile's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fastlinear.core.errors import InputError
from fastlinear.ops.common import calls
from fastlinear.ops.diagonal_linear import reference
from fastlinear.ops.diagonal_linear.validation import validate, validate_out


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a call on these is to be differentiated."""
    return torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in tensors
    )


def into(out: Tensor, y: Tensor, inputs: list[Tensor]) -> Tensor:
    """The result in the caller's memory.

    Raises InputError where that cannot take it; what has no address here is told apart by being
    another tensor.
    """
    addressed = not torch.compiler.is_compiling() and not calls.transforms_active()
    validate_out(out, y, y.dtype, tuple(inputs), addressed=addressed)
    return out.copy_(y)


def unusual(
    public: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    backend: str | None,
) -> Tensor:
    """Tensor subclasses, FX proxies and functorch transforms: plain torch ops carry them.

    ``public`` is the function that was called, which such objects are told of.
    """
    given = tuple(t for t in (x, weight, bias, residual) if t is not None)
    if not all(isinstance(t, Tensor) for t in given) and has_torch_function(given):
        y: Tensor = handle_torch_function(
            public,
            given,
            x,
            weight,
            bias,
            activation=activation,
            residual=residual,
            backend=backend,
        )
        return y
    if not isinstance(x, Tensor) or calls.autocast_dtype(x) is None:
        # under autocast dtypes may differ, and are cast below
        validate(x, weight, bias, activation, residual, backend)
    if backend not in (None, "eager"):
        raise InputError(
            "diagonal_linear",
            "plain strided tensors outside torch.func transforms and forward-mode "
            "differentiation with a forced backend",
            f"x of type {type(x).__name__}, backend={backend!r}",
            "Leave backend out; such calls take PyTorch's own path.",
        )
    x, weight, bias = _autocasted(x, weight, bias)
    return reference.diagonal_linear(x, weight, bias, activation, residual)


def _autocasted(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of the product in the dtype autocast gives a linear layer."""
    dtype = calls.autocast_dtype(x)
    if dtype is None:
        return x, weight, bias

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t

    return cast(x), cast(weight), None if bias is None else cast(bias)


def compiled(
    unusual: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    out: Tensor | None,
    backend: str | None,
) -> Tensor:
    """The call as torch.compile sees it: one registered op; ``unusual`` takes what it cannot."""
    given = [x, weight, *(t for t in (bias, residual) if t is not None)]
    if calls.unlike_plain(given):
        y = unusual(x, weight, bias, activation, residual, backend)
        return y if out is None else into(out, y, given)
    x, weight, bias = _autocasted(x, weight, bias)
    outside = None
    if residual is not None and calls.autocast_dtype(x) not in (None, residual.dtype):
        outside, residual = residual, None
    validate(x, weight, bias, activation, residual, backend)
    grad = needs_grad(x, weight, bias, residual)
    y = torch.ops.fastlinear.diagonal_linear(
        x, weight, bias, residual, activation, grad, backend or ""
    )
    if outside is not None:
        y = outside + y
    if out is None:
        return y
    return into(out, y, given)
