"""Sparse and nested operands: no kernel of ours reads them, and PyTorch's own ops carry some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastlinear.core.errors import FOREIGN_ERRORS, FastlinearError, InputError

T = TypeVar("T")
REMEDY = "Make it dense, for example with t.to_dense(), or of a nested tensor with its values."


def carried(function: str, run: Callable[[], T], **operands: Any) -> T:
    """``run()``, a call by PyTorch's own ops.

    Args:
        function: the function that was called.
        operands: its tensors by name; lists of tensors, and None.

    Raises:
        InputError: PyTorch's ops raise, and an operand is sparse or nested.
    """
    try:
        return run()
    except FastlinearError:
        raise
    except FOREIGN_ERRORS as error:
        odd = _first_odd(operands)
        if odd is None:
            raise
        said = (str(error).strip().splitlines() or [""])[0]
        raise _refusal(function, *odd, f", on which PyTorch raises {said!r}") from error


def refuse_odd(function: str, **operands: Any) -> None:
    """Raise InputError where one of the operands is sparse or nested."""
    odd = _first_odd(operands)
    if odd is not None:
        raise _refusal(function, *odd, "")


def is_odd(t: object) -> bool:
    """Whether a tensor has no strides that a kernel could go by: a sparse or nested one."""
    return isinstance(t, Tensor) and (t.layout is not torch.strided or t.is_nested)


def conversion(name: str, t: Tensor, otherwise: str) -> str:
    """What to do about a tensor of a wrong dtype."""
    return f"Convert it: {name}.dequantize()." if t.is_quantized else otherwise


def unlike_strided(t: Tensor) -> str | None:
    """What a tensor is that has no strides, in words; None for one that has."""
    if t.layout is torch.strided:
        return "a nested tensor" if t.is_nested else None
    return f"a tensor of layout {t.layout}"


def densely(t: Tensor) -> Tensor:
    """The numbers of a tensor as a strided one: of a nested tensor its members' in a row."""
    if not is_odd(t):
        return t
    if t.is_nested:
        return torch.cat([member.reshape(-1) for member in t.unbind()])
    return t.to_dense()


def _first_odd(operands: dict[str, Any]) -> tuple[str, Tensor] | None:
    return next(((name, t) for name, t in _tensors(operands) if is_odd(t)), None)


def _tensors(operands: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, given in operands.items():
        if isinstance(given, list | tuple):
            yield from ((f"{name}[{i}]", t) for i, t in enumerate(given))
        else:
            yield name, given


def _refusal(function: str, name: str, t: Tensor, said: str) -> InputError:
    kind, remedy = "", f"Convert it: {name}.to_dense()."
    if t.is_nested:
        kind = "nested, "
        remedy = f"Convert it: torch.nested.to_padded_tensor({name}, 0.0), or use its values alone."
    return InputError(
        function,
        f"{name} to be a strided tensor",
        f"{kind}layout {t.layout}{said}",
        remedy,
    )
