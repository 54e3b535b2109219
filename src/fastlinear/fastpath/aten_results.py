"""What PyTorch's ops return, without computing it: shape, strides and dtype.

For the ops that backends call. PyTorch's own functions of this kind, its meta kernels, import its
compiler at first use, which takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_COMPOSED = torch._C.DispatchKey.CompositeImplicitAutograd
_COMPARISONS = frozenset(f"aten::{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_UNTAGGED = frozenset({"aten.leaky_relu_backward.default", "aten.mish_backward.default"})
"""Ops that compute number by number although PyTorch does not mark them so."""
_Shape = tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """A tensor that an op makes.

    Attributes:
        shape, dtype: its own.
        strides: None for those of a contiguous tensor.
        device: None for that of the op's first tensor.
    """

    shape: _Shape
    dtype: torch.dtype
    strides: _Shape | None = None
    device: torch.device | None = None


def result_of(op: Any, arguments: tuple[Any, ...]) -> Result | None:
    """What a call returns, with all arguments of the op's schema; None where it is not known."""
    rule = _RULES.get(str(op))
    if rule is not None:
        return rule(*arguments)
    if torch.Tag.pointwise in op.tags or str(op) in _UNTAGGED:
        return _pointwise(op._schema.name, arguments)
    return None


def is_view(op: Any) -> bool:
    """Whether all that an op returns lies in the memory of its arguments."""
    returns = op._schema.returns
    return str(op) == "aten._unsafe_view.default" or (
        bool(returns) and all(r.alias_info is not None for r in returns)
    )


def is_composed(op: Any) -> bool:
    """Whether an op is no more than calls of others."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _COMPOSED.name))


def composed(op: Any, args: Any, kwargs: Any) -> Any:
    """Those calls. ``OpOverload.decompose`` may take a Python form, which imports the compiler."""
    return op._op_dk(_COMPOSED, *args, **kwargs)


def _pointwise(name: str, arguments: tuple[Any, ...]) -> Result | None:
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    kinds = {t.dtype for t in tensors if t.dim() or len(tensors) == 1} - {torch.bool}
    if not tensors or len(kinds) > 1:
        return None
    shape = _broadcast([t.shape for t in tensors])
    whole = [t for t in tensors if tuple(t.shape) == shape]
    strides = _strides_like(whole) if whole else None
    if strides is None:
        return None
    dtype = torch.bool if name in _COMPARISONS or not kinds else next(iter(kinds))
    whole_numbers = not dtype.is_floating_point and dtype is not torch.bool
    if whole_numbers and any(isinstance(a, float) for a in arguments):
        return None
    return Result(shape, dtype, strides)


def _broadcast(shapes: Sequence[Sequence[int]]) -> _Shape:
    """The shape of all together, each aligned at its last dimension."""
    dims = max(map(len, shapes))
    padded = [(1,) * (dims - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


def _strides_like(tensors: Sequence[Tensor]) -> _Shape | None:
    """Strides of what is computed number by number from tensors of one shape: dense, in the order
    in which all of them lie. None where they lie in different ways."""
    shape = tensors[0].shape
    if all(t.is_contiguous() for t in tensors):
        return contiguous(shape)
    orders = {_order(t) for t in tensors}
    if len(orders) > 1:
        return None
    (order,) = orders
    found, after = [0] * len(shape), 1
    for i in reversed(order):
        found[i] = after
        after *= max(1, shape[i])
    return tuple(found)


def _order(t: Tensor) -> tuple[int, ...]:
    """Dimensions from the widest stride to the smallest; one of size 1 goes with the next. Strides
    of 0, of expanded memory, leave the order as it is, as PyTorch has it."""
    strides = list(t.stride())
    expanded = any(stride == 0 and n > 1 for stride, n in zip(strides, t.shape, strict=True))
    for i in range(len(strides) - 1, -1, -1):
        if t.shape[i] == 1 and not expanded:
            strides[i] = strides[i + 1] * t.shape[i + 1] if i + 1 < len(strides) else 1
    found = list(range(len(strides) - 1, -1, -1))  # from the smallest
    for i in range(1, len(found)):
        at = i
        for before in range(i - 1, -1, -1):
            inner, outer = ((strides[d], t.shape[d]) for d in (found[before], found[at]))
            if inner[0] == 0 or outer[0] == 0 or inner == outer:
                continue
            if inner < outer:
                break
            found[before], found[at] = found[at], found[before]
            at = before
    return tuple(reversed(found))


def contiguous(shape: Sequence[int]) -> _Shape:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(max(1, n) for n in shape[i + 1 :]) for i in range(len(shape)))


def facts_of(t: Tensor) -> tuple[Any, ...]:
    """How a tensor lies in its memory: shape, strides, first element, dtype. Strides of a single
    element address nothing, but libraries choose between products by them."""
    return tuple(t.shape), t.stride(), t.storage_offset(), t.dtype


def is_plain(t: Tensor) -> bool:
    """Whether a tensor has the strides that new memory of its shape has."""
    expected = 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True


# --------------------------------------------------------------------------------------------
# Ops by name, with all arguments of their schemas


def _empty(size: Any, dtype: Any, _: Any, device: Any, *__: Any) -> Result:
    where = torch.get_default_device() if device is None else torch.device(device)
    return Result(tuple(size), dtype or torch.get_default_dtype(), None, where)


def _new(t: Tensor, size: Any, dtype: Any, _: Any, device: Any, *__: Any) -> Result:
    return Result(tuple(size), dtype or t.dtype, None, device and torch.device(device))


def _like(t: Tensor, dtype: Any, _: Any, device: Any, *__: Any) -> Result | None:
    strides = _strides_like([t])
    if strides is None:
        return None
    return Result(tuple(t.shape), dtype or t.dtype, strides, device and torch.device(device))


def _linear(x: Tensor, weight: Tensor, *_: Any) -> Result:
    return Result((*x.shape[:-1], weight.shape[0]), x.dtype)


def _product(a: Tensor, b: Tensor, *_: Any) -> Result:
    return Result((*a.shape[:-1], b.shape[-1]), a.dtype)


def _matmul(a: Tensor, b: Tensor) -> Result | None:
    return _product(a, b) if a.dim() == b.dim() == 2 else None


def _grouped_product(a: Tensor, b: Tensor, offsets: Tensor | None, *_: Any) -> Result | None:
    """Of columns of a and rows of b that belong together, as rows that begin at 16 bytes."""
    if offsets is None or (a.dim(), b.dim()) != (2, 2) or b.shape[1] * a.element_size() % 16:
        return None
    return Result((offsets.shape[0], a.shape[0], b.shape[1]), a.dtype)


def _plus_product(_: Tensor, a: Tensor, b: Tensor, *__: Any) -> Result:
    return _product(a, b)


def _sum(t: Tensor, dims: Any, keep: bool, dtype: Any) -> Result | None:
    if keep or dtype is not None or not dims or not t.is_floating_point():
        return None
    gone = {d % t.dim() for d in dims}
    return Result(tuple(n for i, n in enumerate(t.shape) if i not in gone), t.dtype)


def _clone(t: Tensor, memory_format: Any) -> Result | None:
    if memory_format in (0, torch.contiguous_format):
        return Result(tuple(t.shape), t.dtype)
    kept = memory_format in (None, 1, torch.preserve_format)
    strides = _strides_like([t]) if kept else None
    return None if strides is None else Result(tuple(t.shape), t.dtype, strides)


def _to(t: Tensor, dtype: Any, _: Any, device: Any, *__: Any) -> Result | None:
    strides = _strides_like([t])
    if strides is None or device is not None:
        return None
    return Result(tuple(t.shape), dtype or t.dtype, strides)


def _cumsum(t: Tensor, _: int, dtype: Any) -> Result | None:
    if dtype is not None or not t.is_contiguous():
        return None
    return Result(tuple(t.shape), t.dtype if t.is_floating_point() else torch.int64)


_RULES: dict[str, Callable[..., Result | None]] = {
    "aten.empty.memory_format": _empty,
    "aten.zeros.default": _empty,
    "aten.new_empty.default": _new,
    "aten.new_zeros.default": _new,
    "aten.empty_like.default": _like,
    "aten.zeros_like.default": _like,
    "aten.linear.default": _linear,
    "mkldnn._linear_pointwise.default": _linear,
    "mkldnn._linear_pointwise.binary": lambda x, _, weight, *__: _linear(x, weight),
    "aten.mm.default": _product,
    "aten.bmm.default": _product,
    "aten.matmul.default": _matmul,
    "aten._grouped_mm.default": _grouped_product,
    "aten.addmm.default": _plus_product,
    "aten.baddbmm.default": _plus_product,
    "aten._addmm_activation.default": _plus_product,
    "aten.sum.dim_IntList": _sum,
    "aten.clone.default": _clone,
    "aten._to_copy.default": _to,
    "aten.cumsum.default": _cumsum,
}
