"""Sparse and nested operands: PyTorch's own ops carry them, or one clear error says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.core.errors import InputError
from fastlinear.fastpath import lookup

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

X, W, B, V = torch.randn(8, 16), torch.randn(4, 16), torch.randn(4), torch.randn(16)
STACK, BIASES = torch.randn(2, 4, 16), torch.randn(2, 4)
INDEX = torch.tensor([[0, 1], [1, 2]]).repeat(4, 1)
OPS: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
    "linear_act": (fl.linear_act, {"x": X, "weight": W, "bias": B}),
    "mlp": (lambda x, w, b: fl.mlp(x, [w], [b]), {"x": X, "w": W, "b": B}),
    "grouped_linear": (
        fl.grouped_linear,
        {"x": torch.randn(8, 32), "weight": STACK, "bias": BIASES},
    ),
    "shared": (
        lambda x, weight: fl.grouped_linear(x, weight, layout="... k"),
        {"x": X, "weight": STACK},
    ),
    "ragged_linear": (
        fl.ragged_linear,
        {"x": X, "weight": STACK, "group_sizes": torch.tensor([3, 5]), "bias": BIASES},
    ),
    "experts": (
        lambda x, weight, down, bias: fl.experts(
            x, INDEX, torch.ones(8, 2), weight, down, gate_up_bias=bias
        ),
        {"x": X, "weight": STACK, "down": STACK.mT[..., : STACK.shape[1] // 2], "bias": BIASES},
    ),
    "unequal_linear": (
        lambda x, w, b: fl.unequal_linear([x], [w], [b]),
        {"x": X, "w": W, "b": B},
    ),
    "diagonal_linear": (
        fl.diagonal_linear,
        {"x": X, "weight": V, "bias": V, "residual": X},
    ),
    "gated_linear": (
        fl.gated_linear,
        {"x": X, "gate_weight": W, "up_weight": W, "gate_bias": B},
    ),
    "gated_mlp": (
        fl.gated_mlp,
        {"x": X, "gate_weight": W, "up_weight": W, "down_weight": torch.randn(3, 4)},
    ),
    "explain": (fl.explain, {"x": X, "weight": W, "bias": B}),
}
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "bsr": lambda t: t.to_sparse_bsr((2, 2)),
    "mkldnn": lambda t: t.to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "jagged": lambda t: torch.nested.nested_tensor([t, t[:1]], layout=torch.jagged),
}


def as_kind(t: Tensor, kind: str) -> Tensor | None:
    """The tensor in another layout; None where it has no such one."""
    try:
        return KINDS[kind](t)
    except (RuntimeError, IndexError):
        return None


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_odd_operand_is_carried_or_refused(name: str, kind: str) -> None:
    op, operands = OPS[name]
    dense = op(**operands)
    refused = 0
    for argument, given in operands.items():
        odd = as_kind(given, kind)
        if odd is None:
            continue
        for grad in (False, True):
            if grad and odd.is_floating_point():
                odd = odd.detach().requires_grad_()
            try:
                y = op(**{**operands, argument: odd})
            except InputError:
                refused += 1
                continue
            assert name != "explain"
            if kind != "jagged" and isinstance(y, Tensor):
                y = y if y.layout is torch.strided else y.to_dense()
                torch.testing.assert_close(y, dense, rtol=1e-4, atol=1e-5)
    assert refused or kind not in ("nested", "mkldnn")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("coo", "expected weight to be a strided tensor; received layout torch.sparse_coo, on wh"),
        ("nested", 'received nested, layout torch.strided, on which PyTorch raises "Internal erro'),
    ],
)
def test_the_error_names_operand_layout_and_remedy(kind: str, said: str) -> None:
    with pytest.raises(InputError, match="linear_act: ") as caught:
        fl.linear_act(X, KINDS[kind](W), B)
    assert said in str(caught.value)
    wanted = "weight.to_dense()" if kind == "coo" else "torch.nested.to_padded_tensor(weight, 0.0)"
    assert wanted in caught.value.remedy
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_lists_name_the_member() -> None:
    with pytest.raises(InputError, match=r"weights\[1\] to be a strided tensor"):
        fl.mlp(X, [W, KINDS["nested"](torch.randn(4, 4))])
    with pytest.raises(InputError, match="input 1 to be a dense tensor; received a nested"):
        fl.unequal_linear([X, KINDS["nested"](X)], [W, W])


def test_other_errors_of_pytorch_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, *rest: Any, **_: Any) -> Any:
            if func is torch.nn.functional.linear:
                raise RuntimeError("not here")
            return super().__torch_function__(func, *rest)

    with pytest.raises(RuntimeError, match="not here") as caught:
        fl.linear_act(X.as_subclass(Mine), W, B)
    assert not isinstance(caught.value, InputError)


@pytest.mark.skipif(lookup.reason_not() is not None, reason=str(lookup.reason_not()))
def test_the_compiled_fast_path_leaves_them_to_python() -> None:
    assert lookup.wait(300)
    for name, (op, operands) in OPS.items():
        for _ in range(3):
            op(**operands)
        for kind in ("nested", "coo"):
            odd = as_kind(operands["x"], kind)
            assert odd is not None
            try:
                op(**{**operands, "x": odd})
            except InputError:
                continue
            assert kind == "coo", name
