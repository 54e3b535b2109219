"""Calls of linear_act as recorded in C++, beside the Python formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.families.linear import backends, reference
from fastlinear.families.linear.autograd import Formula, LinearAct, backward_from
from fastlinear.families.linear.cpu import onednn
from fastlinear.families.linear.problem import problem
from fastlinear.fastpath import autograd_node, lookup, recorded, recorder

Given = tuple[Tensor, Tensor, Tensor | None]
ONEDNN = onednn.reason_not(problem("forward", 1, 1, 1, dtype="float32", device="cpu")) is None
PIECES = ("grad_pre", "grad_input", "grad_weight")
EAGER = {"forward": "eager", **dict.fromkeys(PIECES, "eager")}
ALL = (True, True, True)


def loaded(piece: str, name: str) -> Callable[..., Any]:
    (found,) = [b for b in backends.FAMILY.candidates(piece) if b.name == name]
    return found.load()


def trained(activation: str, **names: str) -> Formula:
    """A training call's formula out of named backends."""
    names = {**EAGER, **names}
    if "backward" in names:
        backward = loaded("backward", names["backward"])
    else:
        backward = backward_from(*(loaded(p, names[p]) for p in PIECES))
    forward = loaded("forward", names["forward"])
    return Formula(activation, activation_of(activation).saved, forward, backward)


class Way:
    """Calls of one formula through the fast path, and the backwards that Python ran."""

    def __init__(self, formula: Formula, *given: Tensor | None) -> None:
        self.ran = 0
        plain = formula.backward

        def counted(*arguments: Any) -> Any:
            self.ran += recorder.active() is None
            return plain(*arguments)

        self.formula = replace(formula, backward=counted)
        found = lookup.table("linear_act.test")
        assert found is not None
        self.table = found
        found.clear()
        self.admit(*given)

    def admit(self, x: Tensor, w: Tensor, b: Tensor | None) -> None:
        LinearAct.apply(x, w, b, self.formula)
        if x.is_cuda:
            assert lookup.serves_cuda()
            assert autograd_node.serves_cuda()
        plan = recorded.node(self.formula, x, w, b)
        assert plan is not None
        assert self.table.admit(x, w, b, self.formula.activation, None, plan)

    def __call__(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        y = self.table.call(x, w, b, self.formula.activation, None)
        if not torch.is_grad_enabled():  # a checkpoint's first run
            assert y is None
            return reference.linear_act(x, w, b, self.formula.activation)
        assert y is not None
        assert y.grad_fn.name() == "LinearActBackward"
        assert not isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction)
        return y  # type: ignore[no-any-return]


def leaves(*x_shape: int, n: int = 5, needs: tuple[bool, ...] = ALL, **kind: Any) -> Any:
    k = x_shape[-1]
    made = torch.randn(x_shape, **kind), torch.randn(n, k, **kind) / k**0.5, torch.randn(n, **kind)
    return tuple(t.requires_grad_(need) for t, need in zip(made, needs, strict=True))


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def same(a: Any, b: Any) -> None:
    for s, t in zip(a, b, strict=True):
        assert (s is None) == (t is None)
        if s is not None:
            assert s.shape == t.shape
            assert s.dtype == t.dtype
            assert torch.equal(s, t), (s - t).abs().max()


CPU = [{}]
if backends.FAMILY.candidates("grad_pre")[0] is not None:
    CPU += [{"forward": "cpp"}, {"grad_pre": "cpp"}, {"forward": "cpp", "grad_pre": "cpp"}]
CPU += [dict.fromkeys(("forward", "grad_input", "grad_weight"), "gemm_cpp")]
if ONEDNN:
    CPU += [{"forward": "onednn", "grad_input": "onednn", "grad_weight": "onednn"}]


def able(names: dict[str, str], activation: str, device: str, dtype: str = "float32") -> bool:
    for piece, name in names.items():
        (backend,) = [b for b in backends.FAMILY.candidates(piece) if b.name == name]
        p = problem(piece, 4, 8, 8, dtype=dtype, device=device, activation=activation)
        if backend.reason_not(p) is not None:
            return False
    return True
