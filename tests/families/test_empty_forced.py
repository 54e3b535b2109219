"""No rows and a backend by name: the same error, or the same result, compiled or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.core.errors import UnsupportedError
from fastlinear.dispatch.backend import family

Call = Callable[[Tensor, "str | None"], Tensor]
W, TURNED = torch.ones(5, 7), torch.ones(7, 5)
CALLS: dict[str, Call] = {
    "linear_act": lambda x, name: fl.linear_act(x, W, activation="relu", backend=name),
    "mlp": lambda x, name: fl.mlp(x, [W, TURNED], backend=name),
    "gated_mlp": lambda x, name: fl.gated_mlp(x, W, W, TURNED, backend=name),
    "grouped_linear": lambda x, name: fl.grouped_linear(x, torch.ones(1, 5, 7), backend=name),
    "diagonal_linear": lambda x, name: fl.diagonal_linear(x, W[0], None, backend=name),
}
CASES = [
    (op, name)
    for op in CALLS
    for name in (None, *dict.fromkeys(b.name for b in family(op).candidates("forward")))
]


def outcome(run: Callable[[Tensor], Tensor], x: Tensor) -> object:
    try:
        return run(x).shape
    except UnsupportedError as error:
        return str(error)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("op", "name"), CASES)
def test_compiled_as_uncompiled(op: str, name: str | None, grad: bool) -> None:
    def run(x: Tensor) -> Tensor:
        return CALLS[op](x, name)

    x = torch.empty(0, 7, requires_grad=grad)
    torch._dynamo.reset()
    found = outcome(run, x)
    assert outcome(torch.compile(run, fullgraph=True, backend="aot_eager"), x) == found
    if name in (None, "eager"):
        assert isinstance(found, torch.Size)
    elif op == "mlp" and name in ("whole_cpp", "layerwise"):
        assert f"a call that backend '{name}' can serve" in str(found)
