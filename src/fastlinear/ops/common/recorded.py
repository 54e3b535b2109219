"""Plans of the compiled fast path whose tapes are recorded from what Python runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from fastlinear.ops.common import fastpath_node, recorder
from fastlinear.ops.common.fastpath_node import OUTPUT, SPENT

Arranged = Callable[..., tuple[Any, ...]]
"""The tensors of a call → its leading arguments, some of which may be lists of tensors."""


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
    *,
    arranged: Arranged = lambda *tensors: tensors,
) -> Any:
    """The fast path's plan for training calls of a kind that has run, or None while there is no
    library of nodes.

    Args:
        name: of the node.
        formula: its forward takes the leading arguments.
        tensors: those of the call.
        kept, readers, kept_readers: as ``fastpath_node.node`` takes them.
        arranged: how tensors become leading arguments.
    """
    if not fastpath_node.begun():
        return None
    count = len(tensors)

    def forward(*given: Tensor | None) -> list[Tensor | None]:
        y, *made = formula.forward(*arranged(*given))
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


def inference(
    plan: Callable[..., Tensor],
    tensors: Sequence[Tensor | None],
    *,
    arranged: Arranged = lambda *tensors: tensors,
) -> Any:
    """The fast path's plan for calls without gradients of a kind that has run; None where that is
    ``plan`` itself, which takes the leading arguments."""
    if not fastpath_node.begun():
        return None
    spec = _record(lambda *given: (plan(*arranged(*given)),), tensors)
    return None if spec is None else fastpath_node.tape(spec, tensors, plan)


def lists(
    name: str,
    results: int,
    tensors: Sequence[Tensor | None],
    forward: Callable[..., tuple[list[Tensor], Tensor | None]],
    gradients: Callable[..., tuple[Tensor | None, ...]] | None,
    keeps: int,
    arranged: Arranged,
) -> Any:
    """The fast path's plan for calls of lists of a kind that has run; only once ``begun`` says so.

    Args:
        gradients: (gradient of each result, tensors, kept, needs) → a gradient or None for each of
            ``tensors``; None for calls without gradients.
        name, results, tensors, forward, keeps: as ``fastpath_node.lists`` takes them.
        arranged: how tensors become leading arguments.
    """

    def flat(*given: Tensor | None) -> list[Tensor]:
        found, kept = forward(*arranged(*given))
        return found if kept is None else [*found, kept]

    def backward_tape(
        needs: Sequence[bool],
        dys: tuple[Tensor | None, ...],
        given: tuple[Tensor | None, ...],
        kept: tuple[Tensor | None, ...],
    ) -> Any:
        def backward(*all_given: Tensor | None) -> Sequence[Tensor | None]:
            assert gradients is not None
            rest = all_given[results:]
            of_call, of_forward = rest[: len(given)], rest[len(given) :]
            return gradients(all_given[:results], of_call, of_forward, needs)

        return _record(backward, (*dys, *given, *kept), pieces=True)

    return fastpath_node.lists(
        name,
        results,
        tensors,
        forward,
        gradients,
        None if gradients is None else backward_tape,
        _record(flat, tensors, pieces=True),
        keeps,
    )


def _record(
    function: Callable[..., Sequence[Tensor | None]],
    tensors: Sequence[Tensor | None],
    spent: Sequence[int] = (),
    *,
    pieces: bool = False,
) -> tuple[Any, ...] | None:
    if any(t is not None and t.is_cuda for t in tensors) and not fastpath_node.serves_cuda():
        return None
    given = [None if t is None else t.detach() for t in tensors]
    return recorder.record(function, given, spent, pieces=pieces)
