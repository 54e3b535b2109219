"""Plans of the compiled fast path whose tapes are recorded from what Python runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from fastlinear.ops.common import fastpath_node, recorder
from fastlinear.ops.common.fastpath_node import OUTPUT, SPENT


class Formula(Protocol):
    """A family's autograd formula: its two directions, as ``fastpath_node.node`` takes them."""

    @property
    def forward(self) -> Callable[..., tuple[Tensor | None, ...]]:
        """The call's tensors → y, then what it keeps."""

    @property
    def gradients(self) -> Callable[..., tuple[Tensor | None, ...]]:
        """(dy, gradient of the hidden, shape of y, tensors, kept, needs) → gradients."""


def node(
    name: str,
    formula: Formula,
    tensors: Sequence[Tensor | None],
    kept: Sequence[int],
    readers: Sequence[int],
    kept_readers: Sequence[int] | None = None,
) -> Any:
    """The fast path's plan for training calls of a kind that has run, or None while there is no
    library of nodes.

    Args:
        name: of the node.
        formula: its forward takes these tensors.
        tensors: those of the call.
        kept, readers, kept_readers: as ``fastpath_node.node`` takes them.
    """
    if not fastpath_node.begun():
        return None
    count = len(tensors)

    def forward(*given: Tensor | None) -> list[Tensor | None]:
        y, *made = formula.forward(*given)
        pairs = zip(kept, made, strict=False)
        return [y, *(None if how in (OUTPUT, fastpath_node.NOTHING) else t for how, t in pairs)]

    def backward_tape(
        needs: Sequence[bool],
        dy: Tensor,
        given: tuple[Tensor | None, ...],
        made: tuple[Tensor | None, ...],
        over: bool = False,
    ) -> Any:
        last = (over,) if SPENT in kept else ()

        def backward(dy: Tensor, *rest: Tensor | None) -> Sequence[Tensor | None]:
            of_call, of_forward = rest[:count], rest[count:]
            return formula.gradients(dy, None, dy.shape, of_call, of_forward, needs, *last)

        spent = [1 + count + i for i, how in enumerate(kept) if over and how == SPENT]
        return _record(backward, (dy, *given, *made), spent)

    return fastpath_node.node(
        name,
        tensors,
        formula.forward,
        formula.gradients,
        backward_tape,
        _record(forward, tensors),
        kept,
        readers,
        kept_readers,
    )


def inference(plan: Callable[..., Tensor], tensors: Sequence[Tensor | None]) -> Any:
    """The fast path's plan for calls without gradients of a kind that has run; None where that is
    ``plan`` itself, which takes these tensors."""
    if not fastpath_node.begun():
        return None
    spec = _record(lambda *given: (plan(*given),), tensors)
    return None if spec is None else fastpath_node.tape(spec, tensors, plan)


def _record(
    function: Callable[..., Sequence[Tensor | None]],
    tensors: Sequence[Tensor | None],
    spent: Sequence[int] = (),
) -> tuple[Any, ...] | None:
    if any(t is not None and t.is_cuda for t in tensors) and not fastpath_node.serves_cuda():
        return None
    return recorder.record(function, [None if t is None else t.detach() for t in tensors], spent)
