"""What an op must know of the state a call is made in: autocast, transforms, recorders."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastlinear.core.autocast import cast
from fastlinear.core.precision import DTYPE_NAMES, matmul_precision

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types whose memory a kernel may read; subclasses may mean something else by it."""

transforms_active = torch._C._are_functorch_transforms_active
batched = torch._C._functorch.is_legacy_batchedtensor
"""Whether a gradient is a batch of them, as ``torch.autograd.grad(is_grads_batched=True)`` makes:
it has no memory that a kernel could read."""
_unsafe_view = torch.ops.aten._unsafe_view.default
_any_autocast = torch._C._is_any_autocast_enabled
_tracing = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack


def unlike_plain(given: Sequence[Any]) -> bool:
    """Whether a tensor is a subclass, a proxy, sparse, nested or on no memory, or a transform is
    active."""
    if transforms_active():
        return True
    if any(type(t) not in PLAIN or t.layout is not torch.strided for t in given):
        return True
    return not torch.compiler.is_compiling() and any(t.is_nested for t in given)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype autocast gives a matrix product of ``x``, None where it leaves it alone."""
    if not _any_autocast():
        return None
    device = x.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def recorded() -> bool:
    """Whether ``torch.jit.trace`` or a dispatch mode (make_fx, a flop counter) watches torch's ops.

    A kernel of our own is none, so it would be missing from what they record.
    """
    return _tracing() is not None or _dispatch_modes() > 0


def is_captured(x: Tensor) -> bool:
    """Whether a call on this tensor is being recorded into a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def facts_of(x: Tensor) -> dict[str, Any]:
    """What the first tensor of a call tells its Problem, by the keywords of ``problem``."""
    return {
        "dtype": DTYPE_NAMES[x.dtype],
        "device": x.device.type,
        "precision": matmul_precision(x.dtype),
        "captured": is_captured(x),
    }


def wanted(ctx: Any) -> tuple[bool, ...]:
    """Which gradients a ``torch.autograd.Function`` has to give, asked inside its backward.

    ``ctx.needs_input_grad`` has those of all tensors that require one. ``torch.autograd.grad`` of
    some of them, an actor behind critics for example, needs no others.
    """
    needs: tuple[bool, ...] = ctx.needs_input_grad
    if torch.compiler.is_compiling():
        return needs
    nodes = iter([node for node, _ in ctx.next_functions if node is not None])
    return tuple([need and _goes_on(next(nodes, None)) for need in needs])


def _goes_on(node: Any) -> bool:
    """Whether the engine that runs now goes on to a node."""
    try:
        return node is None or torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient is asked for; or no engine runs
        return True


def as_result(y: Tensor, shape: Sequence[int]) -> Tensor:
    """What kernels wrote, in the shape its caller sees: the same memory as a tensor of no base.

    Autograd lets nobody change a view in place that a function of its own, or a call without
    gradients, returned. y must not be kept besides: changes of the two are counted apart.
    """
    if y.shape == shape and not y._is_view():
        return y
    result: Tensor = _unsafe_view(y, shape)
    return result


def forward_mode() -> bool:
    """Whether forward-mode differentiation is under way."""
    return forward_ad._current_level >= 0


def beyond_memory(*dys: Tensor) -> bool:
    """Whether gradients are batched or dual, and mean other numbers than those in their memory."""
    return transforms_active() or forward_mode() or any(map(batched, dys))


def watched() -> bool:
    """Whether PyTorch's ops are differentiated forward or recorded while they run."""
    return forward_ad._current_level >= 0 or _tracing() is not None or _dispatch_modes() > 0


def seen() -> bool:
    """The same, or a function mode sees them as Python calls them."""
    return watched() or _function_modes() > 0


def lies_turned(weight: Tensor) -> bool:
    """Whether an (N, K) weight lies in memory as (K, N), as a Conv1D's transpose does."""
    n, k = weight.shape
    return weight.stride() == (1, n) and n > 1 and k > 1


def device_of(t: Tensor) -> AbstractContextManager[Any]:
    """A context in which the tensor's GPU is the current one; nothing for other devices."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def cast_all(tensors: Sequence[Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """The tensors in the autocast dtype, None left alone."""
    return tuple(None if t is None else cast(t, dtype) for t in tensors)


def as_autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in the dtype that autocast has for the first; themselves where it is off."""
    dtype = autocast_dtype(tensors[0])
    return tensors if dtype is None else cast_all(tensors, dtype)
