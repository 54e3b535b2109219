"""Linears that compute a gated MLP, as one call of ``gated_mlp``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.problem import Problem
from fastlinear.families.gated import reference
from fastlinear.families.gated.problem import NAME
from fastlinear.families.gated.selection import problem_of
from fastlinear.families.gated.stacking import Biases, Weights, split_pre
from fastlinear.nn.recognised import Gated
from fastlinear.rewrite.fusion import Dispatch, Fusion, InForward, WholeForward
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.written import Written
from fastlinear.rewrite.rules.gated.forward import call_gated


def fused_gate(
    fqn: str,
    module: nn.Module,
    members: tuple[Candidate, ...],
    gated: Gated,
    forward: InForward | WholeForward,
    *,
    backend: str | None,
    title: str = "",
    opened: Written | None = None,
    original: Callable[[Tensor], Tensor] | None = None,
) -> Fusion:
    """Gate, up and down projection as one call.

    Args:
        fqn, module: the module whose forward makes the call.
        members: the linears, in the order in which ``gated`` names them.
        gated: how they compute a gated MLP.
        forward: how it is put in place.
        backend: a forced backend of gated_mlp, or None.
        title: what notes call it, by default by its first and last linear.
        opened: what the forward makes of gate and up, where it is written out.
        original: what the model did with the value that both halves read, if not its linears alone.
    """
    calls = members[0].calls

    def held() -> tuple[Weights, Biases]:
        tensors = iter(c.weight_and_bias() for c in members)
        layers = gated.gate, gated.up, gated.down
        found = [(None, None) if layer is None else next(tensors) for layer in layers]
        weights, biases = zip(*found, strict=True)
        return Weights(*weights), Biases(*biases)

    def problem(x: Tensor) -> Problem:
        def cast(t: Tensor | None) -> Any:
            return None if t is None else t.detach().to(calls.autocast or t.dtype)

        weights, biases = held()
        rows = cast(x).reshape(-1, x.shape[-1])
        given = Weights(*map(cast, weights)), Biases(*map(cast, biases))
        return problem_of(rows, *given, gated.activation, gated.order, None, calls.grad)

    def layers(x: Tensor, rewritten: Mapping[str, Candidate]) -> Tensor:
        def one(member: Candidate, x: Tensor) -> tuple[Tensor, str]:
            found = rewritten.get(member.fqn)
            if found is None:
                return type(member.module).forward(member.module, x), "none"
            return found.after(x), found.activation

        first, done = one(members[0], x)
        second = None if gated.up is None else one(members[1], x)[0]
        gate, up = split_pre((first, second), gated.order)
        if opened is not None:
            hidden = opened.run(gate, up)
        else:
            hidden = (gate if done != "none" else activation_of(gated.activation).value(gate)) * up
        return hidden if gated.down is None else one(members[-1], hidden)[0]

    def exact(x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        def given(layer: str | None, title: str) -> Any:
            return None if layer is None else parameters.get(f"{gated.names.index(layer)}.{title}")

        def weight(layer: str | None) -> Any:  # (N, K)
            found = given(layer, "dW")
            turned = layer is not None and members[gated.names.index(layer)].kind == "conv1d"
            return found.t() if turned else found

        names = gated.gate, gated.up, gated.down
        weights = Weights(*map(weight, names))
        biases = Biases(*(given(layer, "db") for layer in names))
        return reference.gated_mlp(x, weights, biases, gated.activation, gated.order)

    how = "" if opened is None else f" ({gated.activation} written out)"
    return Fusion(
        rule=NAME,
        fqn=fqn,
        module=module,
        members=members,
        calls=calls,
        problems=tuple(problem(k.x) for k in calls.kinds),
        layers=layers,
        original=original,
        after=lambda x: call_gated(x, *held(), gated, backend),
        exact=exact,
        forward=forward,
        # PyTorch's own path is one operation
        dispatch=Dispatch(backend=backend, eager_may_gain=opened is not None),
        alike=() if opened is None else opened.alike,
        what=f"its gated MLP of {len(members)} linears{how}",
        title=title,
    )
