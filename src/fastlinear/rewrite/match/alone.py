"""A module by itself: its forward of one tensor, traced in evaluation and in training, and run on
numbers that show what a trace does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.fx import Graph

from fastlinear.core.errors import FOREIGN_ERRORS
from fastlinear.profile.graph import Observed, Untraceable, stand_in, trace
from fastlinear.rewrite.match.eligible import refuse_module
from fastlinear.rewrite.swap.traceable import why_not

_GIVEN = Observed.of((torch.empty(0, device="cpu"),), {})
_TOLERANCE = 1e-9
_FAR = (1e9, -1e9, float("inf"), float("-inf"), float("nan"))
_COMMON = 1e6
_MOST = 2**15  # numbers of a run


def traced_alone(module: nn.Module) -> tuple[tuple[nn.Module, Graph], ...] | str:
    """A copy of the module that shares its tensors and the trace of its forward, in evaluation and
    in training; or why there are none: what a trace would not show of it."""
    refusal = refuse_module(module)
    if refusal is not None:
        return refusal.reason.rstrip(".")
    reason = why_not(module)
    if reason is not None:
        return f"its forward {reason}"
    found = []
    try:
        for training in (False, True):
            copied, _ = stand_in(module, _GIVEN)
            vars(copied).pop("forward", None)  # of a rewrite
            for part in copied.modules():
                part.training = training
            found.append((copied, trace(copied, _GIVEN, runnable=True)))
    except Untraceable as error:
        return f"its forward cannot be traced: {error}"
    return tuple(found)


@contextmanager
def undisturbed() -> Iterator[torch.Generator]:
    """Ordinary CPU tensors with gradients, whatever mode the caller is in; its random state is put
    back. Gives a generator of numbers."""
    on_cpu = torch.get_default_device().type == "cpu"
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        nullcontext() if on_cpu else torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
    ):
        yield torch.Generator("cpu").manual_seed(0)


def inputs(features: int, width: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Inputs in float64 of several ranks, many rows among them, some of whose numbers are large or
    not finite.

    Args:
        features: the last dimension of each.
        width: the most numbers that are made of a row.
        generator: of the others.
    """
    rows = max(len(_FAR), min(1200, _MOST // max(1, width)))
    for lead in ((2, 3), (1,), (), (2, 1, 2, 2), (rows,)):
        x = torch.randn((*lead, features), generator=generator, dtype=torch.float64, device="cpu")
        yield x
    for i, far in enumerate(_FAR):
        x[i, i % features] *= far
    yield x


def same(
    f: Callable[[Tensor], Tensor],
    g: Callable[[Tensor], Tensor],
    x: Tensor,
    held: Sequence[Tensor] = (),
) -> bool:
    """Whether two functions agree on x; of common numbers in every gradient as well.

    Args:
        f: what is tried, which may fail or write to its input.
        g: what it should be.
        x: an input, of ``inputs``.
        held: the parameters of both.
    """
    try:
        found = _results(f, x, held)
    except FOREIGN_ERRORS:
        return False
    expected = _results(g, x, held)
    if len(found) != len(expected):
        return False
    return all(_close(a, b) for a, b in zip(found, expected, strict=True))


def leaves_alone(f: Callable[[Tensor], Tensor], x: Tensor) -> bool | None:
    """Whether f does not write to its input; None where it fails on x."""
    given = x.clone()
    try:
        with torch.no_grad():
            f(given)
    except FOREIGN_ERRORS:
        return None
    return torch.allclose(given, x, rtol=0.0, atol=0.0, equal_nan=True)


def _results(
    f: Callable[[Tensor], Tensor], x: Tensor, held: Sequence[Tensor]
) -> list[Tensor | None]:
    """f(x) and its gradients in x and in ``held``; nothing where it gives no tensor of x's dtype
    that can be differentiated."""
    leaf = x.clone().requires_grad_()
    torch.default_generator.manual_seed(1)  # what is dropped
    y = f(leaf * 1.0)
    if not isinstance(y, Tensor) or y.dtype != x.dtype or not y.requires_grad:
        return []
    if not bool((x.abs() < _COMMON).all()):
        return [y.detach()]
    dy = torch.linspace(-1.0, 2.0, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *held], dy, allow_unused=True)]


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether they are alike beside the numbers of their rows; what is not finite is so in both."""
    if a is None or b is None:
        return a is b
    finite = b.isfinite()
    if a.shape != b.shape or not torch.equal(a.isfinite(), finite):
        return False
    size = b.where(finite, 0.0).abs()
    size = size.amax(-1, keepdim=True) if b.dim() else size
    off = (a - b).abs().where(finite, 0.0)
    return bool((off <= _TOLERANCE * (size + _TOLERANCE)).all())
