"""Plans of the compiled fast path whose tapes are recorded from what Python runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from fastlinear.core import calls
from fastlinear.fastpath import autograd_node, recorder
from fastlinear.fastpath.autograd_node import OUTPUT, SPENT
from fastlinear.fastpath.launch import Y


class Formula(Protocol):
    """A family's autograd formula: its two directions, and what the node in C++ must know of it."""

    @property
    def node(self) -> str:
        """The node's name, ending in ``Backward``."""

    @property
    def forward(self) -> Callable[..., tuple[Tensor | None, ...]]:
        """The leading arguments → y, then what it keeps."""

    @property
    def gradients(self) -> Callable[..., tuple[Tensor | None, ...]]:
        """(dy, gradient of the hidden, shape of y, tensors, kept, needs) → gradients."""

    @property
    def kept(self) -> tuple[int, ...]:
        """How each tensor that the forward keeps is kept, as ``autograd_node.node`` takes it."""

    @property
    def readers(self) -> tuple[int, ...]:
        """For each tensor the gradients that read it, as bits; one number holds for the rest."""

    @property
    def kept_readers(self) -> tuple[int, ...] | None:
        """The same for each that is kept; None for all gradients."""


def node(formula: Formula, *leading: Any) -> Any:
    """The fast path's plan for training calls of a kind that has run.

    None while there is no library of nodes, where a vector of parameters is not dense, or for too
    many tensors.

    Args:
        formula: its forward takes the leading arguments, its gradients their tensors.
        leading: tensors, None, or lists or tuples of those, x first.
    """
    tensors = _leaves(leading)
    count, kept = len(tensors), formula.kept
    vectors = (t for t in tensors[1:] if t is not None and t.dim() == 1 and t.is_floating_point())
    dense = all(t.is_contiguous() for t in vectors)
    if not dense or count > autograd_node.MAX_TENSORS or not autograd_node.begun():
        return None
    readers = formula.readers + formula.readers[-1:] * (count - len(formula.readers))

    def forward(*given: Tensor | None) -> list[Tensor | None]:
        y, *made = formula.forward(*_nested(given, leading))
        pairs = zip(kept, made, strict=False)
        return [y, *(None if how in (OUTPUT, autograd_node.NOTHING) else t for how, t in pairs)]

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
        return _record(backward, (dy, *given, *made), spent) if _serves((dy,)) else None

    return autograd_node.node(
        formula.node,
        tensors,
        formula.forward,
        formula.gradients,
        backward_tape,
        _record(forward, tensors) if _serves(tensors) else None,
        kept,
        readers,
        formula.kept_readers,
    )


def inference(plan: Callable[..., Any], *leading: Any) -> Any:
    """The fast path's plan for calls without gradients of a kind that has run; None where that is
    ``plan`` itself, which takes these leading arguments and returns a tensor, or a tuple of several
    tensors and None.

    On a CPU that is so where a mode is on, which sees PyTorch's ops as Python calls them.
    """
    tensors = _leaves(leading)
    if not tensors[0].is_cuda and calls.seen():
        return None
    begun = autograd_node.begun()
    if len(tensors) > autograd_node.MAX_TENSORS or not (begun or tensors[0].is_cuda):
        return None

    def results(*given: Tensor | None) -> Sequence[Tensor | None]:
        found = plan(*_nested(given, leading))
        return (found,) if isinstance(found, Tensor) else found

    spec = _record(results, tensors)
    if spec is None:
        return None
    found = _one_launch(spec, plan, tensors)
    if found is None and begun and _serves(tensors):
        return autograd_node.tape(spec, tensors, plan)
    return found


def _one_launch(spec: tuple[Any, ...], plan: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    """The table's own plan where a tape is one launch, whose result has the shape of x but for its
    last size; else None."""
    steps, (y, *more), masks, _, stream, _ = spec
    if (
        not tensors[0].is_cuda
        or more
        or stream is not None
        or [step[0] for step in steps] != ["empty", "kernel"]
        or y != steps[0][1]
    ):
        return None
    x, (dtype, _, shape) = tensors[0], steps[0][2:]
    if recorder.SCALAR_TYPES[x.dtype] != dtype or shape[:-1] != tuple(x.shape[:-1]):
        return None
    function, config, slots, places, *rest = steps[1][1]
    of_y = tuple((kind, where, Y if t == y else t, offset) for kind, where, t, offset in places)
    return "launch", plan, (function, config, slots, of_y, *rest), masks, shape[-1]


def lists(
    name: str,
    results: int,
    leading: Sequence[Any],
    forward: Callable[..., tuple[list[Tensor], Tensor | None]],
    gradients: Callable[..., tuple[Tensor | None, ...]] | None,
    keeps: int,
) -> Any:
    """The fast path's plan for calls of lists of a kind that has run, or None while there is no
    library of nodes.

    Args:
        leading: tensors, None, or lists or tuples of those.
        gradients: (gradient of each result, tensors, kept, needs) → a gradient or None for each
            tensor; None for calls without gradients.
        name, results, forward, keeps: as ``autograd_node.lists`` takes them.
    """
    tensors = _leaves(leading)
    if not autograd_node.begun() or not _serves(tensors):
        return None

    def flat(*given: Tensor | None) -> list[Tensor]:
        found, kept = forward(*_nested(given, leading))
        return found if kept is None else [*found, kept]

    def backward_tape(
        needs: Sequence[bool],
        dys: tuple[Tensor | None, ...],
        given: tuple[Tensor | None, ...],
        kept: tuple[Tensor | None, ...],
    ) -> Any:
        def backward(*every: Tensor | None) -> Sequence[Tensor | None]:
            assert gradients is not None
            rest = every[results:]
            of_call, of_forward = rest[: len(given)], rest[len(given) :]
            return gradients(every[:results], of_call, of_forward, needs)

        return _record(backward, (*dys, *given, *kept), pieces=True)

    return autograd_node.lists(
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
    given = [None if t is None else t.detach() for t in tensors]
    return recorder.record(function, given, spent, pieces=pieces)


def _serves(tensors: Sequence[Tensor | None]) -> bool:
    """Whether the library of nodes, which must be there, can launch where these lie."""
    on_cuda = any(t is not None and t.is_cuda for t in tensors)
    return not on_cuda or autograd_node.serves_cuda()


def _leaves(leading: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for given in leading:
        found += given if isinstance(given, tuple | list) else (given,)
    return found


def _nested(tensors: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """The tensors as leading arguments, of the structure of others."""
    left = iter(tensors)
    return [
        (list if isinstance(given, list) else tuple)([next(left) for _ in given])
        if isinstance(given, tuple | list)
        else next(left)
        for given in like
    ]
