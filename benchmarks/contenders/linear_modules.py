"""One layer called as a module: what a call of ``fl.nn.Linear`` costs beside ``nn.Linear`` and an
activation module, where the arithmetic is next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from benchmarks.harness.case import Case
from benchmarks.harness.peer import OURS, Peer
from benchmarks.harness.work import Forward, Stack, Unit, Work
from fastlinear.nn.linear import Linear

Made = Callable[[Stack], Forward]
_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}


def peers(case: Case) -> tuple[Peer, ...]:
    """The two modules called one after the other, in a Sequential, and ours."""
    return (
        Peer("eager", partial(_unit, two_modules)),
        Peer("sequential", partial(_unit, sequential), _alone),
        Peer(OURS, partial(_unit, ours)),
        Peer(f"{OURS}[eager]", partial(_unit, partial(ours, backend="eager"))),
    )


def _alone(case: Case) -> str | None:
    return "one module: there is no sequence" if case.option("activation") == "none" else None


def two_modules(stack: Stack) -> Forward:
    """``activation(linear(x))``, as a forward has it; without an activation the linear alone."""
    linear = _linear(stack)
    if stack.activation == "none":
        return lambda s: linear(s.x)
    activation = _ACTIVATIONS[stack.activation]()
    return lambda s: activation(linear(s.x))


def sequential(stack: Stack) -> Forward:
    """``nn.Sequential(linear, activation)``."""
    both = nn.Sequential(_linear(stack), _ACTIVATIONS[stack.activation]())
    return lambda s: both(s.x)


def ours(stack: Stack, backend: str | None = None) -> Forward:
    """``fl.nn.Linear`` with the activation inside."""
    layer = Linear.from_linear(_linear(stack), activation=stack.activation, backend=backend)
    return lambda s: layer(s.x)


def _unit(made: Made, work: Work) -> Unit:
    return work.unit(made(work.stacks[0]))


def _linear(stack: Stack) -> nn.Linear:
    """``nn.Linear`` with the parameters of the case."""
    (weight,), (bias,) = stack.weights, stack.biases
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    assert isinstance(weight, nn.Parameter)
    assert isinstance(bias, nn.Parameter)
    layer.weight, layer.bias = weight, bias
    return layer
