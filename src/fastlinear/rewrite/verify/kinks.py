"""Which side of its kink each activation of a run took, and an oracle that takes the same sides.

relu, leaky_relu and clamps at 0 have no derivative at 0, but a set of them. A pre-activation that
is 0 but for rounding may lie on either side in a correct implementation, and the gradients then
differ by far more than rounding. So the sides of every run are seen while it runs, and the float64
oracle takes them at the elements at which ``core.compare.other_side`` allows it: PyTorch's sides
to judge PyTorch's error, and those of the rewritten model where it fails by PyTorch's. Forward
values are the oracle's own throughout.

Only activations that go through torch's functions are seen, and those in ``linear_act``,
``grouped_linear``, ``mlp`` and calls of several layers as a rewritten forward makes them. If a run
and the oracle do not call the same ones in the same order, the oracle keeps its own sides. What
checkpointing runs again during the backward is not seen either, and there the oracle's gradients
are on its own sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.core.compare import KINKED, other_side
from fastlinear.core.function_mode import KnowingMode
from fastlinear.families.grouped.op import grouped_linear
from fastlinear.families.linear import linear_act
from fastlinear.families.mlp import mlp
from fastlinear.families.mlp import reference as chain
from fastlinear.families.mlp.autograd import Formula
from fastlinear.families.mlp.op import by_formula
from fastlinear.rewrite.swap.layered import LAYERED

_FUSED = KINKED | {"relu2"}  # relu2's derivative is continuous, but its relu alone is a kink
_RELUS = frozenset(
    {F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
    | {F.leaky_relu, F.leaky_relu_, torch._C._nn.leaky_relu}
)
_CLAMPS = frozenset(
    {torch.clamp, torch.clamp_, Tensor.clamp, Tensor.clamp_, torch.clip, Tensor.clip}
    | {torch.clamp_min, torch.clamp_min_, Tensor.clamp_min, Tensor.clamp_min_}
)


class UnlikeRuns(Exception):
    """The oracle's kinked activations are not those of the run it is to follow."""


class Sides(KnowingMode):
    """While on, keeps a copy of the output of every kinked activation, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_kinked(func, args, kwargs):
            return func(*args, **kwargs)
        if func is mlp:
            y = by_formula(*args, **kwargs)
            self.outputs += _sides_of_chain(y, *args, **kwargs)
            return y
        if func in LAYERED:
            names = LAYERED[func].activations(*args, **kwargs)
            layers = LAYERED[func].results(*args, **kwargs)
            kinked = [i for i, name in enumerate(names) if name in _FUSED]
            groups = range(len(layers[0]))  # one after another, as the model runs them
            self.outputs += [layers[i][g].detach().clone() for g in groups for i in kinked]
            return layers[-1]
        at_zero = args[0].detach() == 0 if func in _CLAMPS else None
        result = func(*args, **kwargs)
        kept = result.detach().clone()
        if at_zero is not None:  # there a clamp passes the gradient on, though its output is 0
            kept[at_zero] = torch.finfo(kept.dtype).tiny
        self.outputs.append(kept)
        return result


class Following(KnowingMode):
    """While on, every kinked activation takes a run's sides where rounding decides them.

    Args:
        torch_outputs: what ``Sides`` kept of PyTorch's own run in the dtype under test.
        own_outputs: what it kept of the run to be judged.

    Raises UnlikeRuns on leaving, or at the first activation that is not one of theirs.
    """

    def __init__(
        self,
        torch_outputs: Sequence[Tensor],
        own_outputs: Sequence[Tensor],
    ) -> None:
        super().__init__()
        self.pairs = list(zip(torch_outputs, own_outputs, strict=False))
        self.same = len(torch_outputs) == len(own_outputs)
        self.done = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_kinked(func, args, kwargs):
            return func(*args, **kwargs)
        x = args[0]
        if not self.same or self.done >= len(self.pairs):
            raise UnlikeRuns(f"more than {self.done} kinked activations")
        torchs, own = self.pairs[self.done]
        self.done += 1
        if not x.shape == torchs.shape == own.shape:
            raise UnlikeRuns(f"an activation of shape {tuple(x.shape)}, not {tuple(own.shape)}")
        return _on_sides(func, x, args[1:], kwargs, torchs, own)

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        if exc_type is None and not (self.same and self.done == len(self.pairs)):
            raise UnlikeRuns(f"{self.done} kinked activations, not {len(self.pairs)}")


def _sides_of_chain(
    y: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
    final_activation: str,
    **_: Any,
) -> list[Tensor]:
    """Sides of every layer of one call of ``mlp``: of what its backward has kept."""
    formula: Any = getattr(y.grad_fn, "formula", None)
    if not isinstance(formula, Formula):  # PyTorch's own ops computed it
        with torch.no_grad(), Sides() as sides:
            chain.mlp(x, weights, biases, activation, final_activation)
        return sides.outputs
    found = []
    if activation in _FUSED:
        kept: Any = y.grad_fn
        hidden = kept.saved_tensors[2 * formula.layers + 1 : 3 * formula.layers]
        found = [t.detach().clone().view(*x.shape[:-1], t.shape[-1]) for t in hidden]
    if final_activation in _FUSED:
        found.append(y.detach().clone())
    return found


def following(
    torch_outputs: Sequence[Tensor],
    own_outputs: Sequence[Tensor],
    oracle: Callable[[], dict[str, Tensor]],
) -> dict[str, Tensor] | None:
    """The oracle's results on a run's own sides; None where it cannot follow.

    Args:
        torch_outputs, own_outputs: see ``Following``.
        oracle: computes the oracle's results.
    """
    try:
        with Following(torch_outputs, own_outputs):
            return oracle()
    except UnlikeRuns:
        return None


def _on_sides(
    func: Callable[..., Tensor],
    x: Tensor,
    rest: tuple[Any, ...],
    kwargs: dict[str, Any],
    torchs: Tensor,
    own: Tensor,
) -> Tensor:
    """``func`` at x, with the derivative of the other side of 0 where the run took that side."""
    with torch.no_grad():
        exact = func(x.detach().clone(), *rest, **kwargs)
        turned = other_side(x, exact, torchs.to(x.device), own.to(x.device))
        mirrored = torch.where(x > 0, -x, (-x).clamp_min(torch.finfo(x.dtype).tiny))
        shift = torch.where(turned, mirrored - x, torch.zeros_like(x))
    if not bool(turned.any()):
        return func(x, *rest, **kwargs)
    moved = x + shift
    y = func(moved, *rest, **kwargs)
    inplace = y is moved
    y = y + (exact - y).detach()
    return x.copy_(y) if inplace else y


def _is_kinked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func in LAYERED:
        return bool(_FUSED.intersection(LAYERED[func].activations(*args, **kwargs)))
    if func is linear_act or func is mlp or func is grouped_linear:
        return bool(_FUSED & {kwargs["activation"], kwargs.get("final_activation")})
    if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        return False
    if func in _RELUS:
        return True
    if func in _CLAMPS:
        low = kwargs.get("min", args[1] if len(args) > 1 else None)
        high = kwargs.get("max", args[2] if len(args) > 2 else None)
        return high is None and isinstance(low, int | float) and low == 0
    return False
