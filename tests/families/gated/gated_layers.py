"""Small layers of gated_mlp, and what they are held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import activation as activation_of
from fastlinear.dispatch.backend import family
from fastlinear.families.gated.problem import problem

K, H, N = 5, 6, 4
BACKENDS = tuple(b.name for b in family("gated_mlp").candidates("forward"))
ABLE = tuple(
    b.name
    for b in family("gated_mlp").candidates("forward")
    if b.reason_not(problem("forward", 7, K, H, N, dtype="float32", device="cpu", needs_grad=True))
    is None
)
LEVELS = (None, 0, 1)


def by_hand(
    x: Tensor,
    wg: Tensor,
    wu: Tensor,
    wd: Tensor | None,
    bg: Tensor | None,
    bu: Tensor | None,
    bd: Tensor | None,
    activation: str,
) -> Tensor:
    """As models write it: independent of the family's own code."""
    h = activation_of(activation).value(F.linear(x, wg, bg)) * F.linear(x, wu, bu)
    return h if wd is None else F.linear(h, wd, bd)


def parameters(grad: bool = True, down: bool = True) -> list[Tensor | None]:
    """wg, wu, wd, bg, bu, bd."""
    shapes = ((H, K), (H, K), (N, H), (H,), (H,), (N,))
    made: list[Tensor | None] = [torch.randn(s, requires_grad=grad) for s in shapes]
    return made if down else [*made[:2], None, *made[3:5], None]


def stack(one: Tensor | None, other: Tensor | None, order: str) -> Tensor | None:
    """Gate and up as one tensor that has the order."""
    if one is None or other is None:
        return None
    if order == "interleaved":
        return torch.stack([one, other], 1).flatten(0, 1)
    return torch.cat([one, other] if order == "gate_up" else [other, one])


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def grads(y: Tensor, given: list[Tensor | None], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, [t for t in given if t is not None], dy)


def called(x: Tensor, p: list[Tensor | None], activation: str, **options: Any) -> Tensor:
    wg, wu, wd, bg, bu, bd = p
    if wd is None:
        return fl.gated_linear(x, wg, wu, bg, bu, activation=activation, **options)  # type: ignore[arg-type]
    return fl.gated_mlp(x, wg, wu, wd, bg, bu, bd, activation=activation, **options)  # type: ignore[arg-type]


def stored(run: Callable[[], Tensor], given: Sequence[Tensor | None]) -> tuple[Tensor, int]:
    """What it gives, and the bytes of all that autograd saves meanwhile, ``given`` left out."""
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run()
    own = {t.untyped_storage().data_ptr() for t in given if t is not None}
    return y, sum(size for where, size in found.items() if where not in own)
