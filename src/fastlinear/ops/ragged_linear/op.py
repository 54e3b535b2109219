"""The public function ragged_linear: groups of one size whose numbers of rows differ."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.ops.common import calls
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.grouped_linear import triton_config
from fastlinear.ops.grouped_linear.plans import as_autocast
from fastlinear.ops.ragged_linear import products

BACKENDS = ("loop", "triton")
_INTEGERS = (torch.int32, torch.int64)
_MAX_GROUPS = 2047


def ragged_linear(
    x: Tensor,
    weight: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    backend: str | None = None,
) -> Tensor:
    """Rows sorted by group, each by its group's linear layer: ``y_t = act(x_t W_gᵀ + b_g)``.

    Group 0 owns the first ``group_sizes[0]`` rows, group 1 the next, and so on, as a mixture of
    experts has them; rows after the last group's give exact zeros, forward and backward.

    Args:
        x: shape (T, K).
        weight: shape (G, N, K), any strides; dtype and device of x.
        group_sizes: shape (G,), int32 or int64, on x's device.
        bias: shape (G, N), or None.
        activation: a name ``grouped_linear`` knows.
        backend: ``"triton"``, one launch forward and at most two backward, on CUDA devices; or
            ``"loop"``, a product of PyTorch a group, which reads the sizes on the host and so waits
            for the device. None takes "triton" wherever it can serve.

    Returns:
        y (T, N), in x's dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or a name is unknown; with "loop" also a
            negative size, or sizes that pass T together. "triton" does not wait to look at them: a
            negative size counts as 0, and what passes T is cut off.
        UnsupportedError: a forced backend cannot serve the call; the message says why.

    float32, bfloat16, float16 and float64; 16-bit dtypes accumulate in float32. Deterministic for
    a given backend and sizes. Differentiable, to any order.

    >>> import torch, fastlinear as fl
    >>> x, w = torch.ones(5, 3), torch.ones(2, 4, 3)
    >>> fl.ragged_linear(x, w, torch.tensor([3, 1]))[:, 0]
    tensor([3., 3., 3., 3., 0.])
    """
    activation_of(activation, "ragged_linear")
    if backend is not None and backend not in BACKENDS:
        _fail(f"backend in {', '.join(BACKENDS)} or None", repr(backend), "Leave it out.")
    given = [x, weight, group_sizes] if bias is None else [x, weight, group_sizes, bias]
    for t in given:
        if not isinstance(t, Tensor):
            _fail("tensors", type(t).__name__, "Convert it with torch.as_tensor.")
    x, weight, bias = as_autocast(x, weight, bias)
    _validate(x, weight, group_sizes, bias)
    if torch.compiler.is_compiling() and backend is None:
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        op = torch.ops.fastlinear.ragged_linear
        found: Tensor = op(x, weight, group_sizes, bias, activation, grad)[0]
        return found
    why = _reason_not_triton(x, weight, given)
    if backend == "triton" and why is not None:
        raise UnsupportedError(
            "ragged_linear",
            expected="a call that backend 'triton' can serve",
            received=f"one that it cannot: {why}",
            remedy="Leave backend out.",
        )
    if why is None and backend != "loop":
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in given)):
            return by_kernels(x, weight, group_sizes, bias, activation, False)[0]
        y: Tensor = _Ragged.apply(x, weight, bias, group_sizes, activation)
        return y
    return loop(x, weight, group_sizes, bias, activation)


def loop(
    x: Tensor, weight: Tensor, group_sizes: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """The same by one product of PyTorch a group; the sizes are read on the host."""
    sizes = group_sizes.tolist()
    total = sum(sizes)
    if min(sizes) < 0 or total > x.shape[0]:
        _fail(
            f"group_sizes of at least 0 that sum to at most the {x.shape[0]} rows of x",
            f"least {min(sizes)}, sum {total}",
            "Count the rows of each group, for example with torch.bincount.",
        )
    given = [t for t in (x, weight, bias) if t is not None]
    watched = calls.transforms_active() or calls.forward_mode() or calls.recorded()
    if watched or torch.compiler.is_compiling() or any(type(t) not in calls.PLAIN for t in given):
        return products.composed(x, weight, sizes, bias, activation)
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        y: Tensor = products.Products.apply(x, weight, bias, sizes, activation)
        return y
    return products.forward(x, weight, sizes, bias, activation, False)[0]


class _Ragged(torch.autograd.Function):
    """The autograd formula over the Triton backend."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group_sizes: Tensor,
        activation: str,
    ) -> Tensor:
        """y (T, N)."""
        kind = activation_of(activation).saved
        save_pre = any(ctx.needs_input_grad) and kind == "pre"
        y, pre = by_kernels(x, weight, group_sizes, bias, activation, save_pre)
        ctx.save_for_backward(x, weight, bias, group_sizes, y if kind == "output" else pre)
        ctx.activation = activation
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """(dx, dW, db, None, None); by PyTorch's own ops where a graph is asked for."""
        x, weight, bias, group_sizes, saved = ctx.saved_tensors
        activation = ctx.activation
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            with torch.enable_grad():
                own: list[Any] = [None if t is None else t.view_as(t) for t in (x, weight, bias)]
                y = loop(own[0], own[1], group_sizes, own[2], activation)
                needs = zip(own, (need_x, need_w, need_b), strict=True)
                wanted = [t if need else None for t, need in needs]
                inputs = [t for t in wanted if t is not None]
                found = iter(torch.autograd.grad(y, inputs, dy, create_graph=True))
            return (*(None if t is None else next(found) for t in wanted), None, None)
        needed = (need_x, need_w, need_b)
        rest = (group_sizes, activation, needed)
        return (*gradients(dy, saved, x, weight, *rest), None, None)


def by_kernels(
    x: Tensor,
    weight: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
) -> tuple[Tensor, Tensor | None]:
    """(y, pre if asked), (T, N) each, in one launch of the Triton backend."""
    from fastlinear.ops.ragged_linear import triton

    flat = None if bias is None else bias.resolve_neg().contiguous()
    sizes = group_sizes.contiguous()
    return triton.product(_rows(x), weight.resolve_neg(), flat, None, sizes, activation, save_pre)


def gradients(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    group_sizes: Tensor,
    activation: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dW, db), each None where not needed, in at most two launches of the Triton backend."""
    from fastlinear.ops.ragged_linear import triton

    sizes, grad = group_sizes.contiguous(), _rows(dy)
    dx = dw = db = None
    if needs[0]:
        dx = triton.grad_input(grad, saved, weight.resolve_neg(), sizes, activation)
    if needs[1] or needs[2]:
        rest = (sizes, activation, needs[1], needs[2])
        dw, db = triton.grad_weight(grad, saved, _rows(x), *rest)
    return dx, dw, db


def _rows(t: Tensor) -> Tensor:
    """t with contiguous rows that do not overlap."""
    t = t.resolve_neg()
    return t if t.stride(1) == 1 and t.stride(0) >= t.shape[1] else t.contiguous()


def _reason_not_triton(x: Tensor, weight: Tensor, given: list[Tensor]) -> str | None:
    """Why the Triton backend cannot serve, or None."""
    if x.device.type != "cuda":
        return "its kernels run on CUDA devices only"
    if torch.compiler.is_compiling() or calls.recorded():
        return "a compiler or a recorder is active"
    if calls.transforms_active() or calls.forward_mode():
        return "a transform is active"
    if any(type(t) not in calls.PLAIN or t.layout is not torch.strided for t in given):
        return "takes plain strided tensors"
    groups, n, k = weight.shape
    if not x.numel() * weight.numel():
        return "an empty call needs no kernel"
    if groups > _MAX_GROUPS:
        return f"serves at most {_MAX_GROUPS} groups, the call has {groups}"
    if not _has_triton():
        return "the package triton is not installed"
    capability = device_facts(x.device).capability
    return triton_config.reason_not(x.shape[0], 1, k, n, x.dtype, capability)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def served_by(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str:
    """The backend that serves valid tensors by default."""
    given = [t for t in (x, weight, bias) if t is not None]
    return "loop" if _reason_not_triton(x, weight, given) else "triton"


def _validate(x: Tensor, weight: Tensor, group_sizes: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 3 or weight.shape[0] == 0:
        _fail(
            "weight of shape (G, N, K) with at least one group",
            f"shape {tuple(weight.shape)}",
            "Stack the groups' weights (N, K): torch.stack(weights).",
        )
    groups, n, k = weight.shape
    if x.dim() != 2 or x.shape[1] != k:
        _fail(
            f"x of shape (T, {k}) for weight of shape {tuple(weight.shape)}",
            f"shape {tuple(x.shape)}",
            "Flatten its tokens: x.flatten(0, -2).",
        )
    if group_sizes.shape != (groups,) or group_sizes.dtype not in _INTEGERS:
        _fail(
            f"group_sizes of shape ({groups},), int32 or int64",
            f"shape {tuple(group_sizes.shape)}, {group_sizes.dtype}",
            "Give the number of rows of each group.",
        )
    if bias is not None and bias.shape != (groups, n):
        _fail(
            f"bias of shape ({groups}, {n})",
            f"shape {tuple(bias.shape)}",
            "Give one number per group and output feature, or None.",
        )
    if x.dtype not in DTYPE_NAMES:
        _fail(f"a dtype in {', '.join(DTYPE_NAMES.values())}", str(x.dtype), "Convert the input.")
    for name, t in (("weight", weight), ("bias", bias), ("group_sizes", group_sizes)):
        if t is None:
            continue
        if t.device != x.device:
            _fail(f"{name} on {x.device}", str(t.device), f"Move it: {name}.to(x.device).")
        if t is not group_sizes and t.dtype is not x.dtype:
            _fail(
                f"{name} of x's dtype {x.dtype}",
                str(t.dtype),
                "Convert one of them, or use torch.autocast.",
            )


def _fail(expected: str, received: str, remedy: str) -> NoReturn:
    raise InputError("ragged_linear", expected=expected, received=received, remedy=remedy)
