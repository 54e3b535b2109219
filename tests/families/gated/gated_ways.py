"""Calls of gated_mlp in Python and as tapes, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.families.gated import reference
from fastlinear.families.gated.autograd import Formula, GatedMLP
from fastlinear.families.gated.cuda import backend as cuda
from fastlinear.families.gated.cuda import planes
from fastlinear.families.gated.products import PYTORCH, Gate, backward_by
from fastlinear.families.gated.stacking import Biases, Weights, empty_like, split_pre
from fastlinear.fastpath import lookup, recorded

BIASES = ("no", "yes", "some")
ORDERS = ("apart", "gate_up", "up_gate")
ALL = (True,) * 7


def draw(
    shape: tuple[int, ...],
    order: str,
    bias: str,
    needs: Sequence[bool] = ALL,
    sizes: tuple[int, int] = (24, 40),
    down: bool = True,
    **kind: Any,
) -> list[Tensor | None]:
    """x of that shape, three weights, three biases; ``sizes``: H and N."""
    k, (h, n) = shape[-1], sizes
    apart = order == "apart"
    rows = h if apart else 2 * h

    def one(*of: int, scale: float = 1.0) -> Tensor:
        return torch.randn(of, **kind) * scale

    found = [
        one(*shape),
        one(rows, k, scale=k**-0.5),
        one(h, k, scale=k**-0.5) if apart else None,
        one(n, h, scale=h**-0.5) if down else None,
        one(rows) if bias != "no" and not (apart and bias == "some") else None,
        one(h) if bias != "no" and apart else None,
        one(n) if bias == "yes" and down else None,
    ]
    return [
        None if t is None else t.detach().requires_grad_(need)
        for t, need in zip(found, needs, strict=True)
    ]


def same(a: Any, b: Any) -> None:
    for s, t in zip(a, b, strict=True):
        assert (s is None) == (t is None)
        if s is not None:
            assert s.shape == t.shape
            assert torch.equal(s, t), (s - t).abs().max()


class Way:
    """Calls of one formula through the fast path; ``python`` says whether it may run in Python."""

    def __init__(self, formula: Formula, given: Sequence[Tensor | None]) -> None:
        self.python = True
        self.plain = formula

        def watched(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                assert self.python, "in Python"
                return function(*arguments)

            return run

        names = formula.forward_name, formula.backward_name
        rest = formula.activation, formula.order, formula.save_pre
        self.formula = Formula(*rest, watched(formula.run), watched(formula.backward), *names)
        table = lookup.table("gated_mlp.test")
        assert table is not None
        self.table = table
        table.clear()
        x, weights, biases = self._split(given)
        GatedMLP.apply(*given, self.formula)
        plan = recorded.node(self.formula, x, weights, biases)
        assert plan is not None
        assert table.admit(x, weights[:], biases[:], "a", plan)

    @staticmethod
    def _split(given: Any) -> tuple[Tensor, Weights, Biases]:
        return given[0], Weights(*given[1:4]), Biases(*given[4:])

    def __call__(self, given: Sequence[Tensor | None]) -> Tensor:
        x, weights, biases = self._split(given)
        y = self.table.call(x, weights[:], biases[:], "a")
        assert y is not None
        assert y.grad_fn.name() == Formula.node
        return y  # type: ignore[no-any-return]

    def compare(self, given: Sequence[Tensor | None]) -> None:
        """Once in Python, then by tapes alone; a graph's first backward, and its last, which may
        write over what was kept."""
        wanted = [t for t in given if t is not None and t.requires_grad]
        expected = GatedMLP.apply(*given, self.plain)
        for self.python in (True, False):
            y = self(given)
            for again in (True, True, False):
                dy = torch.randn_like(expected)
                before = torch.autograd.grad(expected, wanted, dy, retain_graph=True)
                found = torch.autograd.grad(y, wanted, dy, retain_graph=again)
                same([y, *found], [expected, *before])


def derive(dh: Any, gate: Any, up: Any, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """(dgate, dup, h)"""
    act = activation_of(activation)
    value = act.value(gate)
    saved = value if act.saved == "output" else gate
    return act.backward(dh * up, saved), dh * value, value * up


def reference_linear(h: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor]:
    return (F.linear(h, weight, bias),)


def elementwise_forward(
    x: Tensor, weights: Weights, biases: Biases, activation: str, order: str, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    pre = reference.pre_activations(x, weights, biases)
    gate, up = split_pre(pre, order)
    h = activation_of(activation).value(gate) * up
    y = h if weights.down is None else F.linear(h, weights.down, biases.down)
    return (y, *pre) if save else (y, None, None)


def elementwise_backward(*arguments: Any) -> Any:
    def forward(pre: Any, activation: str, order: str, over: bool = False) -> Tensor:
        gate, up = split_pre(pre, order)
        return activation_of(activation).value(gate) * up

    def backward(
        dh: Tensor, pre: Any, activation: str, order: str, needs: Any, in_place: bool, over: bool
    ) -> Any:
        dpre = pre if over else empty_like(pre)
        *found, h = derive(dh, *split_pre(pre, order), activation)
        for into, values in zip(split_pre(dpre, order), found, strict=True):
            into.copy_(values)
        sums = [None if t is None or not n else t.sum(0) for t, n in zip(dpre, needs, strict=True)]
        return dpre, h, tuple(sums)

    return backward_by(PYTORCH, Gate(forward, backward), *arguments)


def formula_of(backend: str, order: str, save: bool = True, activation: str = "silu") -> Formula:
    functions: Any = cuda.forward, cuda.backward
    if backend == "planes":
        functions = planes.forward, planes.backward
    if backend == "elementwise" and torch.cuda.is_available():
        from fastlinear.families.gated.triton import backend as triton

        functions = triton.elementwise_forward, triton.elementwise_backward
    elif backend == "elementwise":
        functions = elementwise_forward, elementwise_backward
    return Formula(activation, order, save, *functions, backend, backend)
