"""The single door to torch.library: every op fastlinear registers goes through here.

Registered ops serve ``torch.compile`` and export. Eager calls do not pass here, because a
registered op costs microseconds a call that small layers cannot spare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

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
    """
    _LIBRARY.define(name + schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"fastlinear::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            f"fastlinear::{name}", backward, setup_context=setup_context, lib=_LIBRARY
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
