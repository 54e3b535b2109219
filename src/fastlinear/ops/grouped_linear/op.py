"""The public function grouped_linear: validation, selection, and one autograd formula.

Hot path: one call of the compiled door looks a ready plan up by every fact of the tensors, and runs
it. Where the door cannot be built, or knows no such call, the lookup below does the same.
Validation and selection run only when such a call is seen for the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fastlinear.core.errors import FastlinearError, InputError
from fastlinear.core.precision import matmul_precision
from fastlinear.dispatch import cache
from fastlinear.dispatch.explain import Explanation
from fastlinear.ops import linear_act as single
from fastlinear.ops.common import calls, door, door_node
from fastlinear.ops.common.layouts import carried
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear import programs, reference
from fastlinear.ops.grouped_linear.plans import Resolved, as_autocast, resolved
from fastlinear.ops.grouped_linear.problem import NAME
from fastlinear.ops.grouped_linear.selection import choices
from fastlinear.ops.grouped_linear.validation import validate

_MAX_PLANS = 4096
_is_compiling = torch.compiler.is_compiling


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    layout: str = "... (g k)",
    *,
    backend: str | None = None,
) -> Tensor:
    """Many linear layers of one size as one operation: ``y_g = act(x_g W_gᵀ + b_g)`` for every g.

    Args:
        x: input, any strides; its shape is what ``layout`` says.
        weight: shape (G, N, K): a stack of ``nn.Linear`` weights; any strides. Same dtype and
            device as ``x``.
        bias: shape (G, N), or None.
        activation: none, relu, relu2, silu, gelu (erf), gelu_tanh, sigmoid, tanh, quick_gelu or
            leaky_relu (slope 0.01).
        layout: the shape of x, with g for G and k for K; y has the same with N for K.
            ``"... (g k)"``: (..., G·K), the groups side by side; ``"... g k"``: (..., G, K);
            ``"g ... k"``: (G, ..., K); ``"b (g k) ..."``: (B, G·K, ...), channels first, as
            ``nn.Conv1d(kernel_size=1, groups=G)`` takes it; ``"b g k ..."``: (B, G, K, ...);
            ``"... k"``: (..., K), one input for all groups, for which y is (..., G, N).
        backend: force the backend by name; None lets fastlinear choose.

    Returns:
        y in x's layout and dtype (under autocast: the autocast dtype), dense.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or a name is unknown.
        UnsupportedError: a forced backend cannot serve the call; the message says why.

    float32, bfloat16, float16 and float64; 16-bit dtypes accumulate in float32. Deterministic for
    a given backend and shape. Differentiable, to any order.

    Sparse, nested and quantized tensors are named in an InputError. On the meta device the result
    has its shape and dtype alone.

    >>> import torch, fastlinear as fl
    >>> x, w = torch.ones(5, 2 * 3), torch.ones(2, 4, 3)
    >>> fl.grouped_linear(x, w, activation="relu").shape
    torch.Size([5, 8])
    >>> fl.grouped_linear(x.view(5, 2, 3), w, layout="... g k").shape
    torch.Size([5, 2, 4])
    """
    return call(x, weight, bias, activation, layout, backend)


def call(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    layout: str,
    backend: str | None,
) -> Tensor:
    """``grouped_linear`` with positional arguments: the entry of ``nn.GroupedLinear``."""
    if not _is_compiling():
        y: Tensor | None = _door(x, weight, bias, activation, layout, backend)
        if y is not None:
            return y
    return _looked_up(x, weight, bias, activation, layout, backend)


def _looked_up(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    layout: str,
    backend: str | None,
) -> Tensor:
    if layout == layouts.SHARED:
        run = partial(_shared, x, weight, bias, activation, backend)
        return carried(NAME, run, x=x, weight=weight, bias=bias)
    given = (x, weight) if bias is None else (x, weight, bias)
    if calls.unlike_plain(given) or calls.forward_mode():
        run = partial(_unusual, x, weight, bias, activation, layout, backend)
        return carried(NAME, run, x=x, weight=weight, bias=bias)
    if _is_compiling():
        return _compiled(x, weight, bias, activation, layout, backend)
    if calls.recorded():
        x, weight, bias = as_autocast(x, weight, bias)
        validate(x, weight, bias, activation, layout, backend)
        return reference.grouped_linear(x, weight, bias, activation, layout)
    autocast = calls.autocast_dtype(x)
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    negative = any(t.is_neg() for t in given)
    key: Any = (
        tuple([(t.shape, t.stride(), t.dtype, t.device) for t in given]),
        *(activation, layout, backend, grad, autocast, negative),
        matmul_precision(x.dtype),
        calls.is_captured(x),
    )
    try:
        found = _plans.get(key)
    except TypeError:  # an activation, layout or backend that cannot be hashed: validation names it
        found = None
    if found is None:
        cast = as_autocast(x, weight, bias)
        validate(*cast, activation, layout, backend)
        found = resolved(*cast, activation, layout, backend, grad)
        if autocast is not None or negative:
            found = found.prepared()
        _keep(key, found)
    y = found.plan(x, weight, bias)
    if autocast is None and not negative:
        _admit(found, x, weight, bias, activation, layout, backend)
    return y


def explain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    layout: str = "... (g k)",
    backend: str | None = None,
    needs_grad: bool | None = None,
) -> Explanation:
    """Which backend ``grouped_linear`` takes for this call, why, and why not each other.

    Args:
        x, weight, bias, activation, layout, backend: as for ``grouped_linear``. With one input for
            all groups the call is one of ``linear_act``, and that is what is explained.
        needs_grad: whether to explain the training choice; by default what the tensors say.
    """
    if needs_grad is None:
        needs_grad = torch.is_grad_enabled() and any(
            isinstance(t, Tensor) and t.requires_grad for t in (x, weight, bias)
        )
    if all(isinstance(t, Tensor) for t in (x, weight)) and isinstance(bias, Tensor | None):
        x, weight, bias = as_autocast(x, weight, bias)
    validate(x, weight, bias, activation, layout, backend)
    if layout == layouts.SHARED:
        flat = None if bias is None else bias.flatten()
        return single.explain(
            x,
            weight.flatten(0, 1),
            flat,
            activation=activation,
            backend=backend,
            needs_grad=needs_grad,
        )
    groups, _, k = weight.shape
    rows = layouts.blocks(x.detach(), layout, groups, k)
    order = layouts.order_of(layout, x.shape)
    return Explanation(choices(rows, weight, bias, activation, order, backend, needs_grad))


# --------------------------------------------------------------------------------------------
# Plans: what to call for calls of one kind

_plans: dict[Any, Resolved] = {}


def _no_door(*_: Any) -> None:
    return None


_door: Callable[..., Any] = _no_door


def _forget() -> None:
    _plans.clear()
    _forget_in_door()


def _forget_in_door() -> None:
    """Have the door ask again: formulas that run in Python are recorded in C++ from here on."""
    table = door.table(NAME) if _door is not _no_door else None
    if table is not None:
        table.clear()


cache.on_change(_forget)
door_node.on_ready(_forget_in_door)


def _keep(key: Any, found: Resolved) -> None:
    if len(_plans) >= _MAX_PLANS:
        _forget()
    _plans[key] = found


def _admit(
    found: Resolved,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    layout: str,
    backend: str | None,
) -> None:
    """Make the plan of a call that has run known to the compiled door, if that wants it.

    The door's facts tell more calls apart than a key of ours does.
    """
    global _door
    table = door.table(NAME)
    if table is None:
        return
    _door = table.call
    if x.is_cuda and not door.serves_cuda():
        return
    given = x, weight, bias, activation, layout, backend
    if not table.wants(*given):
        return
    made = None
    if found.formula is not None:
        made = programs.node(found.formula, x, weight, bias)
    elif found.backend is not None:
        made = programs.inference(found.backend, *given[:5], found.plan)
    table.admit(*given, made or found.plan)


# --------------------------------------------------------------------------------------------
# Calls off the hot path


def _shared(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, backend: str | None
) -> Tensor:
    """One input for all groups: one linear layer with G·N outputs."""
    if all(isinstance(t, Tensor) for t in (x, weight)) and isinstance(bias, Tensor | None):
        validate(*as_autocast(x, weight, bias), activation, layouts.SHARED, backend)
    else:
        validate(x, weight, bias, activation, layouts.SHARED, backend)
    groups, n, _ = weight.shape
    flat = None if bias is None else bias.flatten()
    given = x, weight.flatten(0, 1), flat
    if backend is None or _is_compiling():
        y = single.linear_act(*given, activation=activation, backend=backend)
    else:
        try:
            y = single.linear_act(*given, activation=activation, backend=backend)
        except FastlinearError as error:  # the caller knows of no other function
            raise type(error)(NAME, *error.args[1:]) from error
    shaped = y.unflatten(-1, (groups, n))
    if not isinstance(y, Tensor) or calls.unlike_plain((y,)) or _is_compiling():
        return shaped
    if y.requires_grad or calls.recorded():  # y may be kept: changes of the two count as one's
        return shaped
    return calls.as_result(shaped, shaped.shape)


def _unusual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    layout: str,
    backend: str | None,
) -> Tensor:
    """Tensor subclasses, FX proxies and functorch transforms: plain torch ops carry them."""
    given = (x, weight) if bias is None else (x, weight, bias)
    if not all(isinstance(t, Tensor) for t in given) and has_torch_function(given):
        y: Tensor = handle_torch_function(
            grouped_linear,
            given,
            x,
            weight,
            bias,
            activation=activation,
            layout=layout,
            backend=backend,
        )
        return y
    if all(isinstance(t, Tensor) for t in given):
        x, weight, bias = as_autocast(x, weight, bias)
    validate(x, weight, bias, activation, layout, backend)
    if backend not in (None, "eager"):
        raise InputError(
            "grouped_linear",
            "plain strided tensors outside torch.func transforms and forward-mode "
            "differentiation with a forced backend",
            f"x of type {type(x).__name__}, backend={backend!r}",
            "Leave backend out; such calls take PyTorch's own path.",
        )
    return reference.grouped_linear(x, weight, bias, activation, layout)


def _compiled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    layout: str,
    backend: str | None,
) -> Tensor:
    """The call as torch.compile sees it: one registered op."""
    x, weight, bias = as_autocast(x, weight, bias)
    validate(x, weight, bias, activation, layout, backend)
    grad = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    y: Tensor = torch.ops.fastlinear.grouped_linear(
        x, weight, bias, activation, layout, grad, backend or ""
    )[0]
    return y
