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
from fastlinear.dispatch.select import select
from fastlinear.dispatch.steps import behind
from fastlinear.families.mlp import layerwise, reference, spec
from fastlinear.families.mlp.autograd import Formula
from fastlinear.families.mlp.problem import keeps_hidden, problem
from fastlinear.families.mlp.selection import tuning_order

WIDTHS = (12, 20, 16, 8)
LOOPS = {"eager": reference, "layerwise": layerwise}


def training(activation: str, widths: tuple[int, ...] = WIDTHS, final: str = "none") -> Any:
    facts = {"dtype": "float32", "device": "cpu", "precision": "highest", "needs_grad": True}
    names = {"activation": activation, "final_activation": final}
    return problem("forward", 6, widths, **names, **facts)


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


def test_tuning_knows_the_backward_behind_any_forward() -> None:
    p = training("gelu")
    order = tuning_order(p)
    assert behind(p, "layerwise") in order
    assert behind(p, "whole_cpp") in order
    assert len(order) == len(set(order))
    assert sum(q.piece == "backward" and q.family == "mlp" for q in order) == 2
    relu = tuning_order(training("relu"))
    assert sum(q.piece == "backward" and q.family == "mlp" for q in relu) == 1


@pytest.mark.parametrize("final", ["none", "tanh", "gelu"])
def test_every_backward_serves_a_problem_that_keeps_them(final: str) -> None:
    p = behind(training("gelu", final=final), "eager")
    known = family("mlp")
    inputs = known.make_inputs(p, torch.device("cpu"), 0)
    expected = known.reference(p, inputs)
    for backend in known.candidates("backward"):
        if backend.reason_not(p) is not None or backend.why_not_ready(p) is not None:
            continue
        for found, right in zip(flat(backend.load(p)(*inputs)), flat(expected), strict=True):
            assert (found - right).norm() <= 1e-5 * right.norm(), backend.name


def flat(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [t for item in result if item is not None for t in flat(item)]


@pytest.mark.parametrize("forward", [*LOOPS, "whole_cpp"])
@pytest.mark.parametrize("backward", [*LOOPS, "whole_cpp"])
def test_they_are_kept_between_loops_alone_for_weights_that_are_trained(
    forward: str, backward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weights, biases = net()
    weights[1].requires_grad_(False)
    p = training("gelu")
    chosen = select(p, forward), select(p.with_piece("backward"), backward)
    made: list[Formula] = []
    monkeypatch.setattr(spec, "Formula", lambda *given: made.append(Formula(*given)) or made[-1])
    plan = spec._train((x, weights, biases, "gelu", "none", None), chosen).plan
    loops = forward in LOOPS and backward in LOOPS
    assert made[0].hidden == ((False, True) if loops else ())
    wanted = [x, *biases, weights[0], weights[2]]
    found = torch.autograd.grad(plan(x, weights, biases).sum(), wanted)
    expected = torch.autograd.grad(reference.mlp(x, weights, biases, "gelu", "none").sum(), wanted)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


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


@pytest.mark.parametrize("trained", ["all", "x", "last weight"])
def test_a_training_call_keeps_what_its_gradients_read(trained: str) -> None:
    x, weights, biases = net()
    if trained != "all":
        for t in (x, *weights, *biases):
            t.requires_grad_(t is (x if trained == "x" else weights[2]))

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

    given = sum(t.nbytes for t in (x, *weights, *biases))
    pre, first, second = (4 * 6 * n for n in (20 + 16, 20, 16))
    ours = kept(lambda: fl.mlp(x, weights, biases, activation="gelu", backend="layerwise"))
    assert ours == given + pre + {"all": first + second, "x": 0, "last weight": second}[trained]
    if trained == "all":
        assert ours <= kept(theirs) + sum(b.nbytes for b in biases)


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
