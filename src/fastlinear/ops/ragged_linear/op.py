"""The public function ragged_linear: groups of one size whose numbers of rows differ.

Hot path: one call of the compiled door looks a ready plan up by every fact of the tensors, and runs
it, on the sizes that the call has. Where the door knows no such call, validation and the choice of
a backend below come first.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.core.errors import UnsupportedError
from fastlinear.core.wrappers import without_values
from fastlinear.ops.common import calls, door, door_node, layouts
from fastlinear.ops.grouped_linear import triton_config
from fastlinear.ops.ragged_linear import cpp, products, programs
from fastlinear.ops.ragged_linear.formula import Formula, Ragged
from fastlinear.ops.ragged_linear.validation import validate, validate_kinds

NAME = "ragged_linear"
_MAX_GROUPS = 65535  # of Triton's kernels
_is_compiling = torch.compiler.is_compiling


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
    experts has them. Sizes may sum to less than T: the rows behind the last group's belong to none.
    Their y and dx are exact zeros, whatever x, bias and activation are, and they add nothing to dW
    and db. They raise nothing: a sum that is too small by mistake shows as rows of zeros.

    Args:
        x: shape (T, K).
        weight: shape (G, N, K), any strides; dtype and device of x.
        group_sizes: shape (G,), int32 or int64, on x's device; each at least 0, T at most in all.
        bias: shape (G, N), or None.
        activation: a name ``grouped_linear`` knows.
        backend: ``"triton"``, one launch forward and at most two backward, on CUDA devices (on
            Hopper dW of large weights in bfloat16 is PyTorch's grouped product, a few more);
            ``"cpp"``, one C++ call each, on CPUs, in float32 and bfloat16; or ``"loop"``, a
            product of PyTorch a group, which reads the sizes on the host and so waits for the
            device. None takes the first that can serve.

    Returns:
        y (T, N), in x's dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or a name is unknown; with "cpp" and
            "loop" also a negative size, or sizes that pass T together. "triton" does not wait to
            look at them: a negative size counts as 0, and what passes T is cut off.
        UnsupportedError: a forced backend cannot serve the call; the message says why.

    float32, bfloat16, float16 and float64; 16-bit dtypes accumulate in float32. Deterministic for
    a given backend and sizes. Differentiable, to any order.

    >>> import torch, fastlinear as fl
    >>> x, w = torch.ones(5, 3), torch.ones(2, 4, 3)
    >>> fl.ragged_linear(x, w, torch.tensor([3, 1]))[:, 0]
    tensor([3., 3., 3., 3., 0.])
    """
    if not _is_compiling():
        y: Tensor | None = _door(x, weight, (group_sizes, bias), activation, backend)
        if y is not None:
            return y
        if any(layouts.is_odd(t) for t in (x, weight, group_sizes, bias)):
            run = partial(_looked_up, x, weight, group_sizes, bias, activation, backend)
            named = {"x": x, "weight": weight, "group_sizes": group_sizes, "bias": bias}
            return layouts.carried(NAME, run, **named)
    return _looked_up(x, weight, group_sizes, bias, activation, backend)


def _looked_up(
    x: Tensor,
    weight: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None,
    activation: str,
    backend: str | None,
) -> Tensor:
    validate_kinds(x, weight, group_sizes, bias, activation, backend)
    given = x, weight, (group_sizes, bias), activation, backend
    x, weight, bias = calls.as_autocast(x, weight, bias)
    validate(x, weight, group_sizes, bias)
    tensors = [t for t in (x, weight, group_sizes, bias) if t is not None]
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if (_is_compiling() and backend is None) or (
        backend in (None, "loop") and without_values(group_sizes)
    ):
        op = torch.ops.fastlinear.ragged_linear
        found: Tensor = op(x, weight, group_sizes, bias, activation, grad)[0]
        return found
    chosen = _chosen(x, weight, tensors, backend)
    if chosen == "loop":
        return products.loop(x, weight, group_sizes, bias, activation)
    formula = Formula(activation, chosen)
    if grad:
        found = Ragged.apply(x, weight, group_sizes, bias, formula)
    else:
        found = formula.inference(x, weight, (group_sizes, bias))
    if calls.autocast_dtype(x) is None and not any(t.is_neg() for t in tensors):
        _admit(formula, grad, *given)
    return found


def _chosen(x: Tensor, weight: Tensor, given: list[Tensor], backend: str | None) -> str:
    """The backend of a valid call.

    Raises:
        UnsupportedError: the forced one cannot serve it.
    """
    if backend in (None, "loop"):
        return "loop" if backend else _first(x, weight, given)
    reason = _reason_not_cpp if backend == "cpp" else _reason_not_triton
    why = reason(x, weight, given)
    if why is not None:
        raise UnsupportedError(
            "ragged_linear",
            f"a call that backend {backend!r} can serve",
            f"one that it cannot: {why}",
            "Leave backend out.",
        )
    assert backend is not None
    return backend


def _first(x: Tensor, weight: Tensor, given: list[Tensor]) -> str:
    if _reason_not_triton(x, weight, given) is None:
        return "triton"
    if x.device.type == "cpu" and cpp.pays(x, weight) and not _reason_not_cpp(x, weight, given):
        return "cpp"
    return "loop"


def _reason_not_any(x: Tensor, weight: Tensor, given: list[Tensor]) -> str | None:
    """Why nothing of our own can serve, whatever the device, or None."""
    if _is_compiling() or calls.recorded():
        return "a compiler or a recorder is active"
    if calls.transforms_active() or calls.forward_mode():
        return "a transform is active"
    if any(type(t) not in calls.PLAIN or t.layout is not torch.strided for t in given):
        return "takes plain strided tensors"
    if not x.numel() * weight.numel():
        return "an empty call needs no kernel"
    return None


def _reason_not_cpp(x: Tensor, weight: Tensor, given: list[Tensor]) -> str | None:
    """Why the C++ backend cannot serve, or None."""
    return _reason_not_any(x, weight, given) or cpp.reason_not(x, weight)


def _reason_not_triton(x: Tensor, weight: Tensor, given: list[Tensor]) -> str | None:
    """Why the Triton backend cannot serve, or None."""
    if x.device.type != "cuda":
        return "its kernels run on CUDA devices only"
    why = _reason_not_any(x, weight, given)
    if why is not None:
        return why
    groups, n, k = weight.shape
    if groups > _MAX_GROUPS:
        return f"serves at most {_MAX_GROUPS} groups, the call has {groups}"
    if not _has_triton():
        return "the package triton is not installed"
    capability = device_facts(x.device).capability
    return triton_config.reason_not(x.shape[0], 1, k, n, x.dtype, capability)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_not(backend: str, device: str) -> str | None:
    """Why a backend serves nothing on this machine's ``device`` (``"cpu"`` or ``"cuda"``), or None.
    Compiles nothing."""
    if backend == "loop":
        return None
    if backend == "cpp":
        return "compiled for the CPU only" if device != "cpu" else cpp.reason_not_here()
    if device != "cuda":
        return "its kernels run on CUDA devices only"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not _has_triton():
        return "the package triton is not installed"
    capability = device_facts(device).capability
    return triton_config.reason_not(1, 1, 1, 1, torch.bfloat16, capability)


def served_by(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str:
    """The backend that serves valid tensors by default."""
    return _first(x, weight, [t for t in (x, weight, bias) if t is not None])


# --------------------------------------------------------------------------------------------
# The compiled door


def _no_door(*_: Any) -> None:
    return None


_door: Callable[..., Any] = _no_door


def _forget_in_door() -> None:
    """Have the door ask again: formulas that run in Python are recorded in C++ from here on."""
    table = door.table(NAME) if _door is not _no_door else None
    if table is not None:
        table.clear()


door_node.on_ready(_forget_in_door)


def _admit(formula: Formula, grad: bool, *given: Any) -> None:
    """Make the plan of a call that has run known to the compiled door, if that wants it."""
    global _door
    table = door.table(NAME)
    if table is None:
        return
    _door = table.call
    if given[0].is_cuda and not door.serves_cuda():
        return
    if not table.wants(*given):
        return

    def in_python(x: Tensor, weight: Tensor, more: Any) -> Tensor:
        y: Tensor = Ragged.apply(x, weight, *more, formula)
        return y

    if grad:
        table.admit(*given, programs.node(formula, *given[:3]) or in_python)
    else:
        table.admit(*given, programs.inference(formula, *given[:3]) or formula.inference)
