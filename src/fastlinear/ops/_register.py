"""The single door to torch.library: every op fastlinear registers goes through here.

Registered ops serve ``torch.compile`` and export. Eager calls do not pass here, because a
registered op costs microseconds a call that small layers cannot spare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from fastlinear.core.errors import UnsupportedError

_LIBRARY = torch.library.Library("fastlinear", "DEF")
_KEPT: list[Any] = []
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_dispatch_modes = torch._C._len_torch_dispatch_stack


def register_op(
    name: str,
    schema: str,
    *,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Register ``torch.ops.fastlinear.<name>`` for CPU and CUDA.

    Args:
        name: op name.
        schema: arguments and returns, for example ``"(Tensor x) -> Tensor"``.
        implementation: the eager implementation for both devices.
        fake: shapes, dtypes and strides of the results, without computing.
        backward, setup_context: the autograd formula, as ``torch.library.register_autograd`` takes.
            Its gradients cannot be differentiated: that raises UnsupportedError.
    """
    _LIBRARY.define(name + schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"fastlinear::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            f"fastlinear::{name}", _once(name, backward), setup_context=setup_context, lib=_LIBRARY
        )


def _once(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward``, whose gradients raise where they are differentiated.

    Without this they would carry what autograd sees inside the implementation of another op, which
    is less than all: a saved pre-activation has lost its tie to x, a kernel has none.
    """

    def formula(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found, structure = tree_flatten(backward(ctx, *grads))
        tensors = [t for t in found if t is not None]
        read = [t for t in tree_flatten((ctx.saved_tensors, grads))[0] if t is not None]
        marked = iter(_Once.apply(name, len(tensors), *tensors, *read))
        return tree_unflatten([t if t is None else next(marked) for t in found], structure)

    return formula


class _Once(torch.autograd.Function):
    """Gradients as they are, tied to all they were computed from by a node that raises."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.name = name
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(
            ctx.name,
            "to be differentiated once where it is a registered op, as in a compiled function",
            "a derivative of its gradients (create_graph=True)",
            "Call it outside the compiled function: there it is differentiable to any order.",
        )


def register_eager_op(
    name: str,
    schema: str,
    *,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    differentiable: Callable[..., Any],
) -> None:
    """Register ``torch.ops.fastlinear.<name>`` that does what an eager function of ours does.

    A compiled graph that needs no gradients calls it: no formula stands before the function, which
    records its own where the graph, exported, is run with gradients after all. Where such a graph
    is traced once more, nothing can be recorded inside the function: a registered op with a
    formula takes its place.

    Args:
        name: op name.
        schema: arguments and returns; no result may share memory with an argument.
        implementation: the function, for both devices, with or without gradients.
        fake: shapes, dtypes and strides of the results, without computing.
        differentiable: the same through a registered op that has an autograd formula.
    """
    _LIBRARY.define(name + schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"fastlinear::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.fastlinear, name).default

    def before_autograd(keys: Any, *args: Any) -> Any:
        if not _dispatch_modes() and type(args[0]) in _PLAIN:
            return implementation(*args)
        if torch.is_grad_enabled() and _needs_grad(args):
            return differentiable(*args)
        with torch._C._AutoDispatchBelowAutograd():  # type: ignore[no-untyped-call]
            return op.redispatch(keys & torch._C._after_autograd_keyset, *args)

    for key in ("AutogradCPU", "AutogradCUDA"):
        _LIBRARY.impl(name, before_autograd, key, with_keyset=True)


def _needs_grad(args: Sequence[Any]) -> bool:
    """Whether a tensor among the arguments, or in a list among them, needs a gradient."""
    return any(
        _needs_grad(a) if isinstance(a, (list, tuple)) else getattr(a, "requires_grad", False)
        for a in args
    )
