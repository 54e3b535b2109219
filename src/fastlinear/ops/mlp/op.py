"""The public function mlp: validation, selection, and one autograd formula.

Hot path: one call of the compiled door looks up a ready plan by every fact of the tensors and runs
it. Where the door cannot be built, or knows no such call, the lookup below does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fastlinear.core import deprecated
from fastlinear.core.errors import InputError
from fastlinear.core.precision import matmul_precision
from fastlinear.dispatch import cache
from fastlinear.dispatch.explain import Explanation
from fastlinear.ops.common import calls, door, door_node, layouts
from fastlinear.ops.mlp import programs, reference
from fastlinear.ops.mlp.plans import Plan, as_autocast, prepared, resolved
from fastlinear.ops.mlp.reference import Biases, Weights
from fastlinear.ops.mlp.selection import choices
from fastlinear.ops.mlp.validation import sequences, validate

_MAX_PLANS = 4096
_is_compiling = torch.compiler.is_compiling


def mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    activation: str = "relu",
    final_activation: str = "none",
    *,
    backend: str | None = None,
    allow_fast_matmul: bool = False,
) -> Tensor:
    """A chain of linear layers as one operation: ``h_{i+1} = act_i(h_i W_iᵀ + b_i)``, ``h_0 = x``.

    Args:
        x: input, shape (..., n_0), any strides.
        weights: L tensors of shapes (n_{i+1}, n_i), as in ``nn.Linear``. Same dtype and device as
            ``x``. They are read at every call and may change between calls.
        biases: L entries of shape (n_{i+1},) or None, or None for no bias anywhere.
        activation: after every layer but the last; the names ``linear_act`` knows.
        final_activation: after the last layer.
        backend: force the backend by name; None lets fastlinear choose.
        allow_fast_matmul: deprecated, without effect; True warns once.

    Returns:
        Shape (..., n_L), dtype of ``x`` (under autocast: the autocast dtype). Always new memory.

    Raises:
        InputError: shapes, dtypes or devices do not fit (the message names the layer), or an
            activation is unknown.
        UnsupportedError: a forced backend cannot serve the call; the message says why.

    float32, bfloat16, float16 and float64; 16-bit dtypes accumulate in float32 and round between
    layers, as PyTorch does. Deterministic for a given backend and shape. Differentiable, to any
    order.

    Sparse and nested tensors are computed by PyTorch's own ops where those carry them, and named in
    an InputError otherwise; quantized ones are always. On the meta device the result has its shape
    and dtype alone.

    >>> import torch, fastlinear as fl
    >>> weights = [torch.ones(4, 3), torch.ones(2, 4)]
    >>> fl.mlp(torch.ones(5, 3), weights, activation="relu").shape
    torch.Size([5, 2])
    """
    if allow_fast_matmul is not False:
        deprecated.fast_matmul(allow_fast_matmul, "mlp")
    return call(x, weights, biases, activation, final_activation, backend)


def call(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    activation: str,
    final_activation: str,
    backend: str | None,
) -> Tensor:
    """``mlp`` with positional arguments: the entry of ``fastlinear.nn.MLP``."""
    if _is_compiling():
        return _compiled(x, weights, biases, activation, final_activation, backend)
    y: Tensor | None = _door(x, weights, biases, activation, final_activation, backend)
    if y is not None:
        return y
    return _looked_up(x, weights, biases, activation, final_activation, backend)


def run(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    activation: str,
    final_activation: str,
    backend: str | None,
) -> Tensor:
    """``call`` of tensors that are there, though a compiler may be at work: it may run a registered
    op to see what comes out."""
    y: Tensor | None = _door(x, weights, biases, activation, final_activation, backend)
    if y is not None:
        return y
    return _looked_up(x, weights, biases, activation, final_activation, backend)


def by_formula(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    activation: str = "relu",
    final_activation: str = "none",
    *,
    backend: str | None = None,
    allow_fast_matmul: bool = False,
) -> Tensor:
    """``mlp``, recorded by the formula in Python rather than by a node in C++: what the backward
    reads can be looked at there. The same backends, and the same numbers."""
    return _looked_up(x, weights, biases, activation, final_activation, backend)


def explain(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    activation: str = "relu",
    final_activation: str = "none",
    *,
    backend: str | None = None,
    allow_fast_matmul: bool = False,
    needs_grad: bool | None = None,
) -> Explanation:
    """Which backend ``mlp`` takes for this call, why, and why not each other.

    Args:
        x, weights, biases, activation, final_activation, backend, allow_fast_matmul: as for
            ``mlp``.
        needs_grad: whether to explain the training choice; by default what the tensors say.
    """
    if allow_fast_matmul is not False:
        deprecated.fast_matmul(allow_fast_matmul, "explain", stacklevel=4)
    ws, bs = sequences(weights, biases)
    if needs_grad is None:
        needs_grad = torch.is_grad_enabled() and any(
            isinstance(t, Tensor) and t.requires_grad for t in (x, *ws, *bs)
        )
    if isinstance(x, Tensor):
        x, ws, bs = as_autocast(x, ws, bs)
    validate(x, ws, bs, activation, final_activation, backend)
    names = activation, final_activation
    return Explanation(choices(x, ws, bs, *names, backend, needs_grad))


# --------------------------------------------------------------------------------------------
# Plans: what to call for calls of one kind

_PROGRAMMED = (programs.Training, programs.Inference)
_plans: dict[Any, tuple[Plan, Any]] = {}


def _no_door(*_: Any) -> None:
    return None


_door: Callable[..., Any] = _no_door


def _forget() -> None:
    _plans.clear()
    table = door.table("mlp") if _door is not _no_door else None
    if table is not None:
        table.clear()


def _forget_in_door() -> None:
    """Have the door ask again: formulas that run in Python are recorded in C++ from here on.

    What PyTorch's own nodes record stays theirs: a checkpoint counts on the same ones for a call
    and its repetition.
    """
    table = door.table("mlp") if _door is not _no_door else None
    if table is not None:
        table.clear()


cache.on_change(_forget)
door_node.on_ready(_forget_in_door)


def _looked_up(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    activation: str,
    final_activation: str,
    backend: str | None,
) -> Tensor:
    ws, bs = sequences(weights, biases)
    rest = (activation, final_activation, backend)
    given = [x, *ws, *[b for b in bs if b is not None]]
    if calls.unlike_plain(given) or calls.forward_mode():
        run = partial(_unusual, x, ws, bs, *rest)
        return layouts.carried("mlp", run, x=x, weights=ws, biases=bs)
    if calls.recorded():
        x, ws, bs = as_autocast(x, ws, bs)
        validate(x, ws, bs, *rest)
        return reference.mlp(x, ws, bs, activation, final_activation)
    autocast = calls.autocast_dtype(x)
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    negative = any(t.is_neg() for t in given)
    key: Any = (
        tuple([(t.shape, t.stride(), t.dtype, t.device) for t in given]),
        tuple([b is None for b in bs]),
        *rest,
        grad,
        autocast,
        negative,
        matmul_precision(x.dtype),
        calls.is_captured(x),
    )
    try:
        found = _plans.get(key)
    except TypeError:  # an activation or backend that cannot be hashed: validation names it
        found = None
    if found is None:
        found = _resolved(key, x, ws, bs, rest, grad, autocast is not None, negative)
    plan, in_door = found
    y = plan(x, ws, bs)
    if in_door is not None:
        _admit(in_door, plan, x, weights, biases, *rest)
    return y


def _resolved(
    key: Any,
    x: Tensor,
    ws: Weights,
    bs: Biases,
    rest: tuple[str, str, str | None],
    grad: bool,
    autocast: bool,
    negative: bool,
) -> tuple[Plan, Any]:
    """(the plan of a kind of call seen for the first time, what the door runs for it or None)."""
    global _door
    x, ws, bs = as_autocast(x, ws, bs)
    validate(x, ws, bs, *rest)
    native, plan = resolved(x, ws, bs, *rest, grad, autocast)
    in_door: Any = native if isinstance(native, _PROGRAMMED) else plan
    if isinstance(native, tuple):
        in_door = ("chain", *native)
    if autocast or negative:
        plan, in_door = prepared(plan), None
    if len(_plans) >= _MAX_PLANS:
        _forget()
    _plans[key] = plan, in_door
    table = door.table("mlp")
    if table is not None:
        _door = table.call
    return plan, in_door


def _admit(in_door: Any, plan: Plan, x: Tensor, *call: Any) -> None:
    """Make the plan of a call that has run known to the compiled door, if that wants it.

    The door's facts tell more calls apart than a key of ours does.
    """
    if _door is _no_door or (x.is_cuda and not door.serves_cuda()):
        return
    table = door.table("mlp")
    if table is None or not table.wants(x, *call):
        return
    if isinstance(in_door, _PROGRAMMED):
        weights, biases = call[:2]
        dense = biases is None or all(b is None or b.is_contiguous() for b in biases)
        in_door = (programs.made(in_door, x, weights, biases, plan) if dense else None) or plan
    table.admit(x, *call, in_door)


# --------------------------------------------------------------------------------------------
# Calls off the hot path


def _unusual(
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    final_activation: str,
    backend: str | None,
) -> Tensor:
    """Tensor subclasses, FX proxies and functorch transforms: plain torch ops carry them."""
    given = (x, *weights, *biases)
    if not all(isinstance(t, Tensor) for t in given if t is not None) and has_torch_function(given):
        y: Tensor = handle_torch_function(
            mlp,
            given,
            x,
            weights,
            biases,
            activation=activation,
            final_activation=final_activation,
            backend=backend,
        )
        return y
    if not isinstance(x, Tensor) or calls.autocast_dtype(x) is None:
        # under autocast dtypes may differ; torch's own linear checks the rest there
        validate(x, weights, biases, activation, final_activation, backend)
    if backend not in (None, "eager"):
        raise InputError(
            "mlp",
            "plain strided tensors outside torch.func transforms and forward-mode "
            "differentiation with a forced backend",
            f"x of type {type(x).__name__}, backend={backend!r}",
            "Leave backend out; such calls take PyTorch's own path.",
        )
    return reference.mlp(x, weights, biases, activation, final_activation)


def _compiled(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    activation: str,
    final_activation: str,
    backend: str | None,
) -> Tensor:
    """The call as torch.compile sees it: one registered op."""
    ws, bs = sequences(weights, biases)
    rest = (activation, final_activation, backend)
    present = [b for b in bs if b is not None]
    if calls.unlike_plain([x, *ws, *present]):
        return _unusual(x, ws, bs, *rest)
    x, ws, bs = as_autocast(x, ws, bs)
    validate(x, ws, bs, *rest)
    present = [b for b in bs if b is not None]
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *ws, *present))
    has_bias = [b is not None for b in bs]
    names = activation, final_activation
    y: Tensor
    if grad:
        y = torch.ops.fastlinear.mlp(x, list(ws), present, has_bias, *names, grad, backend or "")[0]
        return y
    turned = [calls.lies_turned(w) for w in ws]
    lying = [w.t() if t else w for w, t in zip(ws, turned, strict=True)]
    y = torch.ops.fastlinear.mlp_inference(
        x, lying, present, has_bias, turned, *names, backend or ""
    )
    return y


__all__ = ["call", "explain", "mlp"]
