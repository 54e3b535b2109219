"""Linears that follow each other, as one call of ``mlp``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.problem import Problem
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.problem import NAME
from fastlinear.families.mlp.selection import problem_of
from fastlinear.rewrite.fusion import Dispatch, Fusion, InForward, InSequential
from fastlinear.rewrite.match import edits
from fastlinear.rewrite.match.candidate import Candidate, named, weights_and_biases
from fastlinear.rewrite.match.links import Run
from fastlinear.rewrite.match.parent import Fusable
from fastlinear.rewrite.match.sites import inside
from fastlinear.rewrite.swap import forwards
from fastlinear.rewrite.swap.sequential_forward import Segment

_Layers = Callable[[Tensor, Mapping[str, Candidate]], Tensor]


def in_sequential(
    fqn: str,
    sequential: nn.Module,
    members: tuple[Candidate, ...],
    segment: Segment,
    backend: str | None,
) -> Fusion:
    """Children of a Sequential as one call."""
    names = tuple(inside(fqn, c.fqn) or "" for c in members)
    run = Run(names, segment.activation, segment.final_activation)

    def layers(x: Tensor, rewritten: Mapping[str, Candidate]) -> Tensor:
        children = list(sequential._modules.values())
        by_index = dict(zip(segment.linears, members, strict=True))
        done = False  # whether the linear before has taken the activation with it
        for i in range(segment.start, segment.stop):
            child, member = children[i], by_index.get(i)
            assert child is not None
            if member is not None and member.fqn in rewritten:
                x = rewritten[member.fqn].after(x)
                done = rewritten[member.fqn].activation != "none"
            elif member is not None or not done:
                x = type(child).forward(child, x)
                done = False
            elif not isinstance(child, (nn.Dropout, nn.Identity)):
                done = False
        return x

    how = InSequential(segment, run)
    return _fusion(fqn, sequential, members, run, backend, layers, forward=how, title=named(fqn))


def in_forward(
    fqn: str,
    parent: nn.Module,
    members: tuple[Candidate, ...],
    run: Run,
    fusable: Fusable,
    backend: str | None,
    blocks: tuple[str, ...] = (),
) -> Fusion:
    """Linears that a traced forward calls one after the other, as one call.

    Args:
        fqn, parent: the module whose forward it is.
        members: the linears.
        run: the same by names inside the parent.
        fusable: the trace; it builds one forward for all that is fused in it.
        backend: a forced backend of mlp, or None.
        blocks: modules that the parent calls, by name; their code becomes part of its forward.
    """
    names = tuple(c.fqn for c in members)
    activations = (*(run.activation for _ in members[1:]), run.final_activation)

    def layers(x: Tensor, rewritten: Mapping[str, Candidate]) -> Tensor:
        """Shorter chains of them as one call."""
        i = 0
        while i < len(names):
            member, name = members[i], activations[i]
            found = rewritten.get(member.fqn)
            shorter = None if found is None else found.chain
            end = i if shorter is None or shorter.rule != NAME else i + len(shorter.names)
            if shorter is not None and names[i:end] == shorter.names:
                i = end - 1
                y = shorter.after(x)
                assert isinstance(y, Tensor)
                x, done, name = y, shorter.problems[0].option("final"), activations[i]
            elif found is not None:
                x, done = found.after(x), found.activation
            elif member.activation == name:
                x, done = member.before(x), name
            else:
                x, done = type(member.module).forward(member.module, x), "none"
            if done != name:
                x = activation_of(name).value(x)
            i += 1
        return x

    how = InForward(fusable, edits.chain(run, backend), run.linears, blocks)
    what = f"its chain of {len(members)} linears"
    if blocks:
        what = f"{what} in {len(blocks)} blocks"
    given = fqn, parent, members, run, backend, layers
    return _fusion(*given, forward=how, what=what)


def _fusion(
    fqn: str,
    module: nn.Module,
    members: tuple[Candidate, ...],
    run: Run,
    backend: str | None,
    layers: _Layers,
    **more: Any,
) -> Fusion:
    calls, names = members[0].calls, (run.activation, run.final_activation)

    def problem(x: Tensor) -> Problem:
        def cast(t: Tensor) -> Tensor:
            return t.detach().to(calls.autocast or t.dtype)

        weights, biases = weights_and_biases(members)
        given = [cast(w) for w in weights], [None if b is None else cast(b) for b in biases]
        return problem_of(cast(x), *given, *names, calls.grad)

    def exact(x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        weights = [parameters[f"{i}.dW"] for i in range(len(members))]
        weights = [
            w.t() if c.kind == "conv1d" else w for w, c in zip(weights, members, strict=True)
        ]
        biases = [parameters.get(f"{i}.db") for i in range(len(members))]
        return reference.mlp(x, weights, biases, *names)

    known: dict[str, Any] = {"what": f"its chain of {len(members)} linears", **more}
    return Fusion(
        rule=NAME,
        fqn=fqn,
        module=module,
        members=members,
        calls=calls,
        problems=tuple(problem(k.x) for k in calls.kinds),
        layers=layers,
        after=lambda x: forwards.call_mlp(x, *weights_and_biases(members), *names, backend),
        exact=exact,
        dispatch=Dispatch(backend=backend, eager_may_gain=False),
        **known,
    )
