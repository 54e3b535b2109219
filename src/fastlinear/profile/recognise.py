"""Which known activation a module or function is, found by computing it, not by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.activations.reference import ACTIVATIONS
from fastlinear.core.errors import FOREIGN_ERRORS
from fastlinear.fastpath.aten_steps import Recorder, is_near

_FAR = (1e30, -1e30, float("inf"), float("-inf"), float("nan"), 1.0)
_TOLERANCE = 1e-8  # well below float32's rounding; gelu and gelu_tanh differ by 1e-4


@dataclass(frozen=True)
class Recognised:
    """A known activation.

    Attributes:
        name: as ``fastlinear.linear_act`` knows it.
        inplace: whether the callable overwrites its input.
    """

    name: str
    inplace: bool


def recognise(call: Callable[[Tensor], Any]) -> Recognised | None:
    """The activation ``call`` computes, or None.

    ``call`` gets float64 vectors that reach to ±100, and some numbers that are beyond any bound or
    not finite. Its values and derivatives must agree with one of the known activations to 1e-8,
    each element on its own, and the same every time; what is not finite must be so in both. One op
    of PyTorch with other constants than an activation's is none, however near it is.
    """
    grid, far = _grid(), torch.tensor(_FAR, dtype=torch.float64, device="cpu")
    try:
        copy = grid.clone()
        with Recorder() as recorder:
            call(copy)
        if len(recorder.calls) == 1 and is_near(recorder.calls[0]):
            return None
        beyond, _ = _values(call, far)
        first, changed = _values(call, grid)
        if first is None:
            return None
        again, _ = _values(call, grid)
        folded, _ = _values(call, grid.flip(0).reshape(2, -1))
    except FOREIGN_ERRORS:
        return None
    if again is None or not torch.equal(first, again):
        return None
    if folded is None or not _near(folded.reshape(-1).flip(0), first):
        return None
    for name, known in ACTIVATIONS.items():
        if name == "none" or not _near(first, known.value(grid)):
            continue
        if beyond is None or not _near_far(beyond, known.value(far)):
            return None
        smooth = grid[grid != 0]  # conventions differ for the derivative at a kink
        try:
            slope = _slope(call, smooth)
        except FOREIGN_ERRORS:
            return None
        expected = _slope(known.value, smooth)
        if slope is not None and expected is not None and _near(slope, expected):
            return Recognised(name, changed)
    return None


def recognise_module(module: nn.Module) -> Recognised | None:
    """The activation a module computes, or None.

    Only modules without parameters, buffers or state qualify, and only if they do the same in
    training as in evaluation. Hooks are not run. Draws from torch's random state if the module
    does.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return None
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        return None
    parts = list(module.modules())
    flags = [m.training for m in parts]
    before = [dict(m.__dict__) for m in parts]
    found = []
    try:
        for training in (False, True):
            for m in parts:
                m.__dict__["training"] = training
            found.append(recognise(module.forward))
    finally:
        for m, flag in zip(parts, flags, strict=True):
            m.__dict__["training"] = flag
    stateless = all(_same(m.__dict__, b) for m, b in zip(parts, before, strict=True))
    return found[0] if stateless and found[0] == found[1] else None


def _grid() -> Tensor:
    """An even number of float64 points: dense near 0, and far enough out to see any clipping."""
    core = torch.linspace(-12.0, 12.0, 481, dtype=torch.float64, device="cpu")  # 0 included
    far = torch.tensor(
        [-100.0, -50.0, -20.0, -1e-3, 1e-3, 20.0, 50.0, 100.0, 0.3],
        dtype=core.dtype,
        device="cpu",
    )
    return torch.cat([core, far])


def _values(call: Callable[[Tensor], Any], grid: Tensor) -> tuple[Tensor | None, bool]:
    given = grid.clone()
    with torch.no_grad():
        y = call(given)
    if not isinstance(y, Tensor) or y.shape != grid.shape or y.dtype != grid.dtype:
        return None, False
    return y.clone(), not torch.equal(given, grid)


def _slope(call: Callable[[Tensor], Any], grid: Tensor) -> Tensor | None:
    x = grid.clone().requires_grad_()
    with torch.enable_grad():
        y = call(x * 1.0)  # not a leaf, so that an in-place activation may write to it
        if not y.requires_grad:
            return None
        (slope,) = torch.autograd.grad(y.sum(), x)
    return slope


def _near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE)


def _near_far(a: Tensor, b: Tensor) -> bool:
    finite = b.isfinite()
    return torch.equal(a.isfinite(), finite) and _near(a[finite], b[finite])


def _same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return now.keys() == before.keys() and all(now[k] is v for k, v in before.items())
