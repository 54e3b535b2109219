"""Calls of experts, and what they should give: every slot by itself, in a loop of its own."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import judge
from fastlinear.families.experts import reference
from fastlinear.families.experts.gate import gate_of
from fastlinear.families.experts.op import _call
from fastlinear.families.gated.stacking import halves

NAMES = ("x", "topk_weight", "gate_up", "down", "gate_up_bias", "down_bias")
OPTIONS: dict[str, Any] = {
    name: p.default
    for name, p in inspect.signature(fl.experts).parameters.items()
    if p.kind is p.KEYWORD_ONLY
}
GPT_OSS = {"limit": 0.7, "alpha": 1.702, "up_offset": 1.0}
"""As gpt-oss has them, but for a limit that draws of these calls pass."""


@dataclass(frozen=True)
class Call:
    """A call: its tensors, topk_index apart, and its options."""

    index: Tensor
    tensors: tuple[Tensor | None, ...]
    dy: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Call:
        """The same numbers in another dtype, topk_weight too where that is of x's dtype."""
        kept = self.tensors[0]
        assert kept is not None
        moved = tuple(
            t if t is None else t.to(device, dtype if t.dtype is kept.dtype else t.dtype)
            for t in self.tensors
        )
        return replace(
            self, index=self.index.to(device), tensors=moved, dy=self.dy.to(device, dtype)
        )

    def run(self, backend: str | None, frozen: Sequence[str] = ()) -> list[Tensor | None]:
        """y, then the gradients of all tensors but the frozen ones."""
        own = [
            t if t is None else t.detach().requires_grad_(name not in frozen)
            for name, t in zip(NAMES, self.tensors, strict=True)
        ]
        x, weight, *others = own
        y = fl.experts(x, self.index, weight, *others, backend=backend, **self.options)  # type: ignore[arg-type]
        return [y, *_gradients(y, own, self.dy)]

    def by_torch(self) -> list[Tensor | None]:
        """The same by PyTorch's own ops in the call's dtype."""
        own = [t if t is None else t.detach().requires_grad_() for t in self.tensors]
        x, weight, gate_up, down, *biases = own
        _, weights, _, *names, first, _, _ = _call(
            *(x, self.index, weight, gate_up, down, *biases),
            **{**OPTIONS, **self.options},
        )
        gate = gate_of(*names)
        y = reference.experts(x, weights, (self.index, weight, *biases), gate, int(first))  # type: ignore[arg-type]
        return [y, *_gradients(y, own, self.dy)]

    def expected(self) -> list[Tensor | None]:
        """The same in float64, slot by slot."""
        own = [t if t is None else t.detach().double().requires_grad_() for t in self.tensors]
        y = by_slots(self.index, *own, **self.options)  # type: ignore[arg-type]
        return [y, *_gradients(y, own, self.dy.double())]


def _gradients(y: Tensor, own: Sequence[Tensor | None], dy: Tensor) -> list[Tensor | None]:
    wanted = [t for t in own if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(y, wanted, dy, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in own]


def by_slots(
    index: Tensor,
    x: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    *,
    activation: str = "silu",
    stacked: str = "gate_up",
    transposed: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    first_expert: int = 0,
    **_: Any,
) -> Tensor:
    """y, one slot after the other."""
    rows = []
    for t, choices in enumerate(index.tolist()):
        y = torch.zeros_like(x[t])
        for j, expert in enumerate(choices):
            e = expert - first_expert
            if not 0 <= e < gate_up.shape[0]:
                continue
            both = x[t] @ gate_up[e] if transposed else gate_up[e] @ x[t]
            if gate_up_bias is not None:
                both = both + gate_up_bias[e]
            gate, up = halves(both, None, stacked, 0)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            h = activation_of(activation).value(alpha * gate) / alpha * (up + up_offset)
            out = h @ down[e] if transposed else down[e] @ h
            y = y + weight[t, j] * (out if down_bias is None else out + down_bias[e])
        rows.append(y)
    parameters = [p for p in (gate_up, down, gate_up_bias, down_bias, weight) if p is not None]
    kept = sum((0 * p[:, :0].sum() for p in parameters), 0 * x.sum())
    return torch.stack(rows) + kept if rows else x[:0] + kept


def drawn(
    tokens: int,
    top: int,
    experts: int,
    h: int,
    i: int,
    *,
    bias: str = "both",
    dtype: torch.dtype = torch.float32,
    router: torch.dtype | None = None,
    **options: Any,
) -> Call:
    """A call; some of its slots name experts that are not here.

    Args:
        bias: ``"both"``, ``"none"``, ``"gate_up"`` or ``"down"``.
        router: dtype of topk_weight; None for that of x.
    """
    generator = torch.Generator().manual_seed(tokens + 3 * top + 5 * experts + 7 * h + 11 * i)

    def values(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    first = options.get("first_expert", 0)
    index = torch.randint(first - 1, first + experts + 1, (tokens, top), generator=generator)
    gate_up = values(experts, 2 * i, h, scale=h**-0.5)
    down = values(experts, h, i, scale=i**-0.5)
    if options.get("transposed"):
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    weight = torch.rand(tokens, top, generator=generator).to(router or dtype)
    tensors = (
        *(values(tokens, h), weight, gate_up, down),
        values(experts, 2 * i) if bias in ("both", "gate_up") else None,
        values(experts, h) if bias in ("both", "down") else None,
    )
    return Call(index, tensors, values(tokens, h), options)


def check(
    found: Sequence[Any], theirs: Sequence[Any], oracle: Sequence[Any], factor: float
) -> None:
    """Each result is as exact as the other's, or PyTorch's, by the rule of numbers."""
    assert len(found) == len(oracle) == 7
    for name, a, t, o in zip(("y", *NAMES), found, theirs, oracle, strict=True):
        if a is None:
            continue
        assert a.dtype == t.dtype, name
        assert a.shape == t.shape, name
        verdict = judge(name, a.detach(), t.detach(), o.detach(), factor=factor)
        assert verdict.passed, str(verdict)
