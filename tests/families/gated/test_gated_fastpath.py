"""Calls of gated_mlp through the compiled lookup, and training calls by its nodes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.families.gated.spec import FRONT
from fastlinear.fastpath import autograd_node, lookup
from fastlinear.op.front import no_table


def draw(rows: int) -> list[Tensor]:
    """x, then the gate's, the up and the down weight."""
    sizes = ((24, 16), (24, 16), (16, 24))
    return [torch.randn(rows, 16), *(torch.randn(s, requires_grad=True) for s in sizes)]


def test_a_fast_path_that_comes_later_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of a kind that was seen before the fast path was there go through it afterwards."""
    if not lookup.wait(120):
        pytest.skip(str(lookup.reason_not()))
    tensors = draw(7)
    monkeypatch.setattr(FRONT, "table", no_table)
    FRONT.plans.clear()
    monkeypatch.setattr(lookup, "table", lambda _: None)
    first = fl.gated_mlp(*tensors)
    monkeypatch.undo()
    monkeypatch.setattr(FRONT, "table", no_table)
    assert torch.equal(fl.gated_mlp(*tensors), first)
    assert FRONT.table is not no_table


def test_training_calls_are_recorded_in_cpp() -> None:
    if not (lookup.wait(120) and autograd_node.wait(120)):
        pytest.skip("no compiler here")
    tensors = draw(300)
    for _ in range(3):
        y = fl.gated_mlp(*tensors, backend="cpp")
    assert type(y.grad_fn).__name__ == "CppFunction"
