"""A callable run in float64, where results that differ do so for a reason other than rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fastlinear.cuda_graphs.watch import Watch

_MOST_BYTES = 1 << 29  # of weights that are there twice; more are widened as each op reads them


class _Wide(TorchDispatchMode):
    """Has every op compute in float64, whatever dtypes its arguments have or ask for.

    Attributes:
        whole: whether that was so: nothing narrower was written to or came out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.whole = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Widen the arguments of one op, and run it."""
        kwargs = dict(kwargs or {})
        if func._schema.is_mutable:
            for i, a in enumerate(func._schema.arguments):
                if a.alias_info is not None and a.alias_info.is_write:
                    written = args[i] if i < len(args) else kwargs.get(a.name)
                    self.whole &= not any(map(_is_narrow, pytree.tree_leaves(written)))
        args, kwargs = pytree.tree_map(_widened, (tuple(args), kwargs))
        out = func(*args, **kwargs)
        self.whole &= not any(map(_is_narrow, pytree.tree_leaves(out)))
        return out


def wide_outputs(
    run: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    calls: Sequence[Sequence[Tensor]],
    watch: Watch,
) -> list[Sequence[Tensor]] | None:
    """What ``run`` returns for each of these calls in float64; None where it does not run so."""
    weights = [t for t in watch.tensors if _is_narrow(t)]
    size = sum(8 * t.numel() for t in weights)
    others = {id(t): t.detach().double() for t in weights} if size <= _MOST_BYTES else {}
    device = calls[0][0].device.type
    wide = _Wide()
    try:
        off = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else None
        with off or nullcontext(), torch.no_grad(), watch.swapped(others), wide:
            found = [run([_widened(t) for t in call]) for call in calls]
    except Exception:  # noqa: BLE001  whatever the callable raises, it raises in float64 only
        return None
    return found if wide.whole else None


def _is_narrow(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and (value.is_floating_point() or value.is_complex())
        and value.dtype not in (torch.float64, torch.complex128)
    )


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if _is_narrow(value) and value.is_floating_point():
        return value.detach().double()
    return value
