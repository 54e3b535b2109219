"""The public function unequal_linear: linear layers of different sizes as one operation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.ops.common import calls
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.grouped_linear.plans import as_autocast

BACKENDS = ("loop", "together")
# Most operations of a group, on average: without gradients, and with them
_MOST_FLOPS = 3_000_000_000, 400_000_000
_MOST_FLOPS_ODD = 400_000_000, 20_000_000  # where rows do not begin at 16 bytes
_MOST_FLOPS_SINGLE = 400_000_000, 400_000_000  # in float32
_Maybe = Sequence[Tensor | None]


def unequal_linear(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: _Maybe | None = None,
    *,
    activation: str = "none",
    backend: str | None = None,
) -> list[Tensor]:
    """Linear layers of different sizes: ``y_g = act(x_g W_gᵀ + b_g)`` for every g.

    Args:
        xs: one input a group, shape (..., K_g), any strides; numbers of tokens may differ too.
        weights: one weight a group, shape (N_g, K_g), of x's dtype and device.
        biases: one bias a group, shape (N_g,), or None for a group without; None for none at all.
        activation: a name ``grouped_linear`` knows.
        backend: ``"loop"``, a product of PyTorch a group; ``"together"``, one launch forward and
            at most two backward, on CUDA devices. None lets fastlinear choose.

    Returns:
        The y_g (..., N_g), in order. With "together" they share one allocation.

    Raises:
        InputError: lists, shapes, dtypes or devices do not fit, or a name is unknown.
        UnsupportedError: a forced backend cannot serve the call; the message says why.

    float32, bfloat16, float16 and float64; 16-bit dtypes accumulate in float32. Deterministic for
    a given backend and shapes. Differentiable, to any order.

    >>> import torch, fastlinear as fl
    >>> xs = [torch.ones(5, 3), torch.ones(2, 7)]
    >>> ys = fl.unequal_linear(xs, [torch.ones(4, 3), torch.ones(6, 7)])
    >>> [tuple(y.shape) for y in ys]
    [(5, 4), (2, 6)]
    """
    activation_of(activation, "unequal_linear")
    if backend is not None and backend not in BACKENDS:
        _fail(f"backend in {', '.join(BACKENDS)} or None", repr(backend), "Leave it out.")
    xs, weights = list(xs), list(weights)
    given = [None] * len(xs) if biases is None else list(biases)
    if not len(xs) == len(weights) == len(given):
        received = f"{len(xs)} inputs, {len(weights)} weights, {len(given)} biases"
        _fail("as many inputs as weights and biases", received, "Pass one of each a group.")
    if not xs:
        return []
    for t in (*xs, *weights, *(b for b in given if b is not None)):
        if not isinstance(t, Tensor):
            _fail("tensors in all lists", type(t).__name__, "Convert it with torch.as_tensor.")
    if calls.autocast_dtype(xs[0]) is not None:
        cast = [as_autocast(*group) for group in zip(xs, weights, given, strict=True)]
        xs, weights = [x for x, _, _ in cast], [w for _, w, _ in cast]
        given = [b for _, _, b in cast]
    _validate(xs, weights, given)
    why = _reason_not_together(xs, weights, given) if backend != "loop" else ""
    if backend == "together" and why is not None:
        raise UnsupportedError(
            "unequal_linear",
            expected="a call that backend 'together' can serve",
            received=f"one that it cannot: {why}",
            remedy="Leave backend out.",
        )
    tensors = (*xs, *weights, *given)
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if why is None and (backend == "together" or (backend is None and _pays(xs, weights, grad))):
        if grad:
            return list(_Together.apply(activation, len(xs), *tensors))
        return _forward(xs, weights, given, activation, False)[0]
    return loop(xs, weights, given, activation)


def loop(xs: Sequence[Tensor], weights: Sequence[Tensor], biases: _Maybe, activation: str) -> Any:
    """The same by one product of PyTorch a group."""
    value = activation_of(activation).value
    groups = zip(xs, weights, biases, strict=True)
    return [value(F.linear(x, w, b)) for x, w, b in groups]


def _forward(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: _Maybe,
    activation: str,
    save_pre: bool,
) -> tuple[list[Tensor], list[Tensor] | None]:
    """(the y_g in their inputs' dimensions, the pre-activations as matrices) in one launch."""
    from fastlinear.ops.unequal_linear import cuda

    rows, dense = [_matrix(x) for x in xs], [_dense(w) for w in weights]
    flat = [None if b is None else _dense(b) for b in biases]
    ys, pres = cuda.forward(rows, dense, flat, activation, save_pre)
    for g, x in enumerate(xs):
        if x.dim() != 2:
            ys[g] = ys[g].view(*x.shape[:-1], ys[g].shape[1])
    return ys, pres


class _Together(torch.autograd.Function):
    """All groups by the kernels of cuda."""

    @staticmethod
    def forward(ctx: Any, activation: str, count: int, *given: Tensor | None) -> tuple[Tensor, ...]:
        """given: count inputs, weights and biases; the last may be None."""
        xs, weights, biases = (list(given[i * count : (i + 1) * count]) for i in range(3))
        kind = activation_of(activation).saved
        ys, pres = _forward(xs, weights, biases, activation, kind == "pre")  # type: ignore[arg-type]
        saved = {"none": None, "output": ys, "pre": pres}[kind] or []
        ctx.save_for_backward(*given, *saved)
        ctx.call = activation, count
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        """Gradients of the inputs, weights and biases; by PyTorch's own ops where a graph is asked
        for."""
        activation, count = ctx.call
        given = ctx.saved_tensors
        saved = given[3 * count :]
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return (None, None, *_differentiable(dys, given[: 3 * count], needs, activation))
        return (None, None, *_gradients(dys, saved, given[: 3 * count], needs, activation))


def _gradients(
    dys: Sequence[Tensor],
    saved: Sequence[Tensor],
    given: Sequence[Tensor | None],
    needs: Sequence[bool],
    activation: str,
) -> list[Tensor | None]:
    from fastlinear.ops.unequal_linear import cuda

    count = len(dys)
    xs, weights, biases = (given[i * count : (i + 1) * count] for i in range(3))
    need_x, need_w, need_b = (needs[i * count : (i + 1) * count] for i in range(3))
    rows = [_matrix(dy) for dy in dys]
    kept = [_matrix(s) for s in saved] or None
    grads: list[Tensor | None] = [None] * (3 * count)

    def of(which: Sequence[int]) -> tuple[list[Tensor], list[Tensor] | None]:
        return [rows[g] for g in which], None if kept is None else [kept[g] for g in which]

    wanted = [g for g in range(count) if need_x[g]]
    if wanted:
        dense = [_dense(weights[g]) for g in wanted]
        for g, dx in zip(wanted, cuda.grad_inputs(*of(wanted), dense, activation), strict=True):
            grads[g] = dx.view(xs[g].shape)  # type: ignore[union-attr]
    wanted = [g for g in range(count) if need_w[g] or need_b[g]]
    if wanted:
        inputs = [_matrix(xs[g]) for g in wanted]
        with_bias = [biases[g] is not None and need_b[g] for g in wanted]
        dws, dbs = cuda.grad_weights(*of(wanted), inputs, activation, with_bias)
        for g, dw, db in zip(wanted, dws, dbs, strict=True):
            grads[count + g] = dw if need_w[g] else None
            grads[2 * count + g] = db
    return grads


def _differentiable(
    dys: Sequence[Tensor], given: Sequence[Tensor | None], needs: Sequence[bool], activation: str
) -> list[Tensor | None]:
    count = len(dys)
    # views make each argument a node of its own: gradients must stop at the arguments
    with torch.enable_grad():
        own = [None if t is None else t.view_as(t) for t in given]
        xs, weights, biases = (own[i * count : (i + 1) * count] for i in range(3))
        ys = loop(xs, weights, biases, activation)  # type: ignore[arg-type]
        wanted = [t for t, need in zip(own, needs, strict=True) if need and t is not None]
        found = iter(torch.autograd.grad(ys, wanted, dys, create_graph=True))
    return [
        next(found) if need and t is not None else None for t, need in zip(own, needs, strict=True)
    ]


def _matrix(t: Tensor | None) -> Tensor:
    """t (..., features) as a contiguous (tokens, features)."""
    assert t is not None
    if t.dim() != 2:
        t = t.reshape(math.prod(t.shape[:-1]), t.shape[-1])
    return _dense(t)


def _dense(t: Tensor | None) -> Tensor:
    assert t is not None
    return t if t.is_contiguous() and not t.is_neg() else t.resolve_neg().contiguous()


def _pays(xs: Sequence[Tensor], weights: Sequence[Tensor], grad: bool) -> bool:
    """Whether one launch is faster than a product a group, which waits for launches where products
    are small: on an H200 26 groups of 300 million operations each pay, in 16-bit dtypes whose rows
    do not begin at 16 bytes forward only; of 2.3 billion each they do where rows begin so, forward
    only."""
    if len(xs) < 4:
        return False
    products = sum(2 * x.numel() * w.shape[0] for x, w in zip(xs, weights, strict=True))
    if xs[0].dtype is torch.float32:
        most = _MOST_FLOPS_SINGLE
    else:
        even = all(size % 8 == 0 for w in weights for size in w.shape)
        most = _MOST_FLOPS if even else _MOST_FLOPS_ODD
    return products <= most[grad] * len(xs)


def served_by(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: _Maybe | None = None,
    *,
    grad: bool = False,
) -> str:
    """The backend that serves valid tensors by default, with gradients or without."""
    given = [None] * len(xs) if biases is None else biases
    able = _reason_not_together(xs, weights, given) is None
    return "together" if able and _pays(xs, weights, grad) else "loop"


def _reason_not_together(
    xs: Sequence[Tensor], weights: Sequence[Tensor], biases: _Maybe
) -> str | None:
    """Why one launch cannot serve, or None."""
    x = xs[0]
    if x.device.type != "cuda":
        return "its kernels run on CUDA devices only"
    if torch.compiler.is_compiling():
        return "torch.compile makes its own kernels"
    if calls.transforms_active() or calls.forward_mode() or calls.recorded():
        return "a transform or a recorder is active"
    for t in (*xs, *weights, *(b for b in biases if b is not None)):
        if type(t) not in calls.PLAIN or t.layout is not torch.strided:
            return f"takes plain strided tensors, got {type(t).__name__}"
    from fastlinear.ops.unequal_linear import cuda

    return cuda.reason_not(xs, weights)


def _validate(xs: Sequence[Tensor], weights: Sequence[Tensor], biases: _Maybe) -> None:
    first = xs[0]
    if first.dtype not in DTYPE_NAMES:
        _fail(
            f"a dtype in {', '.join(DTYPE_NAMES.values())}",
            str(first.dtype),
            "Convert the inputs, for example x.float().",
        )
    dtype, device = first.dtype, first.device
    for g, (x, w, b) in enumerate(zip(xs, weights, biases, strict=True)):
        fits = w.dim() == 2 and x.shape[-1:] == w.shape[1:]
        if fits and (b is None or b.shape == w.shape[:1]):
            given = (x, w) if b is None else (x, w, b)
            if all(t.dtype is dtype and t.device == device for t in given):
                continue
        _refuse(g, x, w, b, first)


def _refuse(g: int, x: Tensor, w: Tensor, b: Tensor | None, first: Tensor) -> NoReturn:
    """Say what is wrong with a group."""
    if w.dim() != 2:
        _fail(f"weight {g} of shape (N, K)", f"shape {tuple(w.shape)}", "Reshape it.")
    if x.dim() < 1 or x.shape[-1] != w.shape[1]:
        _fail(
            f"input {g} with {w.shape[1]} features in its last dimension, as weight {g} has",
            f"shape {tuple(x.shape)}",
            "Check the order of the lists.",
        )
    if b is not None and b.shape != (w.shape[0],):
        _fail(
            f"bias {g} of shape ({w.shape[0]},)",
            f"shape {tuple(b.shape)}",
            "Give one number per output feature, or None.",
        )
    named = {"input": x, "weight": w, **({} if b is None else {"bias": b})}
    like = first.dtype, first.device
    name, t = next((n, t) for n, t in named.items() if (t.dtype, t.device) != like)
    _fail(
        f"{name} {g} of dtype {first.dtype} on {first.device}, as input 0 is",
        f"{t.dtype} on {t.device}",
        "Convert or move it, or use torch.autocast.",
    )


def _fail(expected: str, received: str, remedy: str) -> NoReturn:
    raise InputError("unequal_linear", expected=expected, received=received, remedy=remedy)
