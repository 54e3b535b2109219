"""Arguments without effect are accepted, and said to be so once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fastlinear as fl
from fastlinear.core import deprecated
from fastlinear.core.errors import InputError

X, W = torch.randn(5, 4), [torch.randn(3, 4), torch.randn(2, 3)]
CALLS: dict[str, Callable[[Any], Any]] = {
    "mlp": lambda allow: fl.mlp(X, W, allow_fast_matmul=allow),
    "explain": lambda allow: fl.explain(X, W, allow_fast_matmul=allow),
    "MLP": lambda allow: fl.nn.MLP([4, 3], allow_fast_matmul=allow),
    "from_sequential": lambda allow: fl.nn.MLP.from_sequential(
        nn.Sequential(nn.Linear(4, 3)), allow_fast_matmul=allow
    ),
    "Config": lambda allow: fl.Config(allow_fast_matmul=allow),
}


@pytest.fixture(autouse=True)
def nothing_said() -> Iterator[None]:
    before = set(deprecated._warned)
    deprecated._warned.clear()
    yield
    deprecated._warned.clear()
    deprecated._warned.update(before)


@pytest.mark.parametrize("name", CALLS)
def test_true_warns_once_at_the_caller(name: str) -> None:
    with pytest.warns(DeprecationWarning, match="allow_fast_matmul has no effect") as told:
        CALLS[name](True)
    assert [w.filename for w in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in CALLS.values():
            call(True)


@pytest.mark.parametrize("name", CALLS)
def test_false_is_silent_and_anything_else_refused(name: str) -> None:
    CALLS[name](False)
    with pytest.raises(InputError, match="allow_fast_matmul to be True or False"):
        CALLS[name](1)
    assert not deprecated._warned


def test_it_changes_nothing() -> None:
    deprecated._warned.add("allow_fast_matmul")
    assert torch.equal(fl.mlp(X, W, allow_fast_matmul=True), fl.mlp(X, W))

    def run(x: torch.Tensor) -> torch.Tensor:
        return fl.mlp(x, W, allow_fast_matmul=True)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X), run(X))
