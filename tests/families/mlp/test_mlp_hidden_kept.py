"""What hidden layers gave is kept for a backward that would compute it again."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.steps import behind
from fastlinear.families.mlp import layerwise, reference
from fastlinear.families.mlp.problem import keeps_hidden, problem
from fastlinear.families.mlp.selection import tuning_order

WIDTHS = (12, 20, 16, 8)
LOOPS = {"eager": reference, "layerwise": layerwise}


def training(activation: str, widths: tuple[int, ...] = WIDTHS) -> Any:
    facts = {"dtype": "float32", "device": "cpu", "precision": "highest", "needs_grad": True}
    return problem("forward", 6, widths, activation=activation, **facts)


def net() -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    pairs = list(pairwise(WIDTHS))
    weights = tuple(torch.randn(n, k, requires_grad=True) for k, n in pairs)
    biases = tuple(torch.randn(n, requires_grad=True) for _, n in pairs)
    return torch.randn(6, WIDTHS[0], requires_grad=True), weights, biases


def test_loops_keep_what_hidden_layers_gave_beside_their_pre_activations() -> None:
    p = training("gelu")
    assert keeps_hidden(behind(p, "eager"))
    assert keeps_hidden(behind(p, "layerwise"))
    assert not keeps_hidden(behind(p, "whole_cpp"))
    assert not keeps_hidden(behind(training("relu"), "eager"))  # the output is what is kept
    assert not keeps_hidden(behind(training("gelu", (12, 8)), "eager"))  # no hidden layer
    assert behind(p, "eager") in tuning_order(p) or behind(p, "whole_cpp") in tuning_order(p)


@pytest.mark.parametrize("forward", LOOPS)
@pytest.mark.parametrize("backward", LOOPS)
@pytest.mark.parametrize("final", ["none", "silu", "tanh"])
def test_a_backward_reads_them_in_place_of_computing_them(
    forward: str, backward: str, final: str
) -> None:
    x, weights, biases = net()
    with torch.no_grad():
        _, saved = LOOPS[forward].forward(x, weights, biases, "gelu", final, True, True)
        needs = (True, (True,) * 3, (True,) * 3)
        dy = torch.randn(6, 8)
        assert len(saved) == 3 + 2
        run = LOOPS[backward].backward
        found = run(dy, x, weights, saved, "gelu", final, needs)
        again = run(dy, x, weights, saved[:3], "gelu", final, needs)
        moved = (*saved[:3], saved[3], saved[4] + 1.0)
        other = run(dy, x, weights, moved, "gelu", final, needs)
    for a, b in zip(found[1], again[1], strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
    torch.testing.assert_close(other[1][1], found[1][1])
    assert not torch.allclose(other[1][2], found[1][2])  # dW of the layer it entered


@pytest.mark.parametrize("backend", LOOPS)
def test_a_training_call_keeps_as_much_as_pytorch_does(backend: str) -> None:
    x, weights, biases = net()

    def kept(run: Any) -> int:
        sizes: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            run()
        return sum(sizes.values())

    def theirs() -> Tensor:
        return reference.mlp(x, weights, biases, "gelu", "none")

    y = fl.mlp(x, weights, biases, activation="gelu", backend=backend)
    found = torch.autograd.grad(y.sum(), (x, *weights, *biases))
    expected = torch.autograd.grad(theirs().sum(), (x, *weights, *biases))
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
    bytes_of_biases = sum(b.nbytes for b in biases)
    ours = kept(lambda: fl.mlp(x, weights, biases, activation="gelu", backend=backend))
    assert ours <= kept(theirs) + bytes_of_biases


def test_a_backward_alone_is_measured_with_what_its_problem_keeps() -> None:
    known, p = family("mlp"), training("gelu")
    kept = replace(behind(p, "eager"), piece="backward")
    with_them = known.make_inputs(kept, torch.device("cpu"), 0)
    without = known.make_inputs(p.with_piece("backward"), torch.device("cpu"), 0)
    assert (len(with_them[3]), len(without[3])) == (5, 3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_price_counts_them_only_where_nobody_kept_them(device: str) -> None:
    known, p = family("mlp"), replace(training("gelu"), device=device)
    alone = p.with_piece("backward")
    for backend in LOOPS:
        more, fewer = (known.work_of(q, backend) or () for q in (alone, behind(p, backend)))
        assert sum(w.units for w in more) > sum(w.units for w in fewer) > 0
