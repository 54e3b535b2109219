"""mlp without gradients inside a compiled graph: the op it calls, and the weights it gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.spec import FRONT

OP = torch.ops.fastlinear.mlp_inference.default
NAMES = "gelu", "none"


def given(grad: bool) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Two layers: the first's weight lies turned, the second has no bias."""
    ws = [torch.randn(8, 5).requires_grad_(grad), torch.randn(3, 5).requires_grad_(grad)]
    return torch.randn(2, 4, 8, requires_grad=grad), ws, [torch.randn(5, requires_grad=grad)]


def expected_of(x: Tensor, ws: list[Tensor], bs: list[Tensor]) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y = reference.forward(rows, (ws[0].t(), ws[1]), (bs[0], None), *NAMES, False)[0]
    return y.view(*x.shape[:-1], -1)


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad: bool) -> None:
    x, ws, bs = given(grad)
    args = (x, ws, bs, [True, False], [True, False], *NAMES, "")
    torch.library.opcheck(OP, args, raise_exception=True)


def test_it_records_gradients_where_it_is_run_with_them() -> None:
    x, ws, bs = given(True)
    y = OP(x, ws, bs, [True, False], [True, False], *NAMES, "")
    expected = expected_of(x, ws, bs)
    torch.testing.assert_close(y, expected)
    dy, wanted = torch.randn_like(y), (x, *ws, *bs)
    torch.testing.assert_close(
        torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy)
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_an_exported_graph_keeps_its_gradients(compiled: bool) -> None:
    layer = nn.Sequential(fl.nn.MLP([8, 5, 3], activation="gelu"), nn.LayerNorm(3))
    x = torch.randn(4, 8)
    with torch.no_grad():
        program = torch.export.export(layer, (x,), strict=True)
    assert "mlp_inference" in program.graph_module.code
    module = program.module()
    torch._dynamo.reset()
    run: Any = torch.compile(module, backend="aot_eager") if compiled else module
    parameters = list(module.parameters())  # the layers' own
    found = torch.autograd.grad(run(x).pow(3).sum(), parameters)
    expected = torch.autograd.grad(layer(x).pow(3).sum(), parameters)
    torch.testing.assert_close(found, expected)


def test_a_compiled_graph_hands_on_the_parameters_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, (first, second), (bias,) = given(False)
    parameters = [nn.Parameter(first), nn.Parameter(second)]
    seen: list[Any] = []
    real = FRONT.run

    def spy(x: Tensor, weights: list[Tensor], *rest: Any) -> Tensor:
        seen.append([w if w._base is None else w._base for w in weights])
        return real(x, weights, *rest)

    monkeypatch.setattr(FRONT, "run", spy)

    @torch.compile(fullgraph=True)
    def run(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return fl.mlp(x + 1, [first.t(), second], [bias, None], activation="gelu")

    torch._dynamo.reset()
    x = torch.randn(2, 4, 8)
    with torch.no_grad():
        run(x, *parameters)  # torch watches the first call in a mode of its own
        y = run(x, *parameters)
    torch.testing.assert_close(y, expected_of(x + 1, [first, second], [bias]))
    assert all(a is b for a, b in zip(seen[-1], parameters, strict=True))
