"""Linears, with an activation or without, whose result only a dropout reads that is awake.

In evaluation a dropout is the identity, and nothing is found. It only matches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.global_names import own_codes
from fastlinear.profile.effects import class_forward, functions_of
from fastlinear.rewrite.fusion import Dispatch, Fusion, InForward, Report
from fastlinear.rewrite.match.candidate import Candidate, problems_of
from fastlinear.rewrite.match.edits import steps_after
from fastlinear.rewrite.match.links import Links
from fastlinear.rewrite.match.parent import Fusable
from fastlinear.rewrite.match.projections import dropped_at
from fastlinear.rewrite.match.sites import inside
from fastlinear.rewrite.rules.linear_dropout.dropout import (
    call_linear_dropout_of,
    linear_dropout,
    reason_not,
)
from fastlinear.rewrite.session import Session

RULE = "linear_dropout"


def find(session: Session) -> list[Fusion]:
    """The linears of a model in training that a dropout follows."""
    if not session.train:
        return []
    found: list[Fusion] = []
    traces: dict[str, Fusable | None] = {}
    for fqn, candidate in session.candidates.items():
        site = session.sites.get(fqn)
        parent = None if site is None else site.parent_fqn
        name = None if parent is None else inside(parent, fqn)
        if parent is None or name is None or not _served(candidate):
            continue
        if parent not in traces:
            drops = _may_drop(session.model.get_submodule(parent))
            traces[parent] = session.trace(parent) if drops else None
        trace = traces[parent]
        steps = None if trace is None else _steps(trace.links, name)
        if trace is not None and steps is not None:
            found.append(_fusion(session, candidate, parent, name, trace, steps))
    return found if found and reason_not() is None else []


def _may_drop(parent: nn.Module) -> bool:
    """Whether a module holds a dropout that is awake, or its code names one."""
    if any(type(m) is nn.Dropout and m.training and 0.0 < m.p < 1.0 for m in parent.modules()):
        return True
    forward = class_forward(parent)
    functions = functions_of(parent, forward) if isinstance(forward, FunctionType) else ()
    codes = (code for function in functions for code in own_codes(function.__code__))
    return any("dropout" in code.co_names for code in codes)


def _served(c: Candidate) -> bool:
    """Whether its calls give float32 on the CPU."""
    if c.kind not in ("linear", "conv1d") or c.calls.autocast is not None:
        return False
    return all(p.dtype == "float32" and p.device == "cpu" for p in c.problems)


class _Steps:
    """A linear, an activation, and the dropout that reads its result."""

    def __init__(self, links: Links, nodes: list[Node], activation: str, rate: float) -> None:
        self.nodes, self.activation, self.rate = nodes, activation, rate
        last = nodes[-1]
        if last.op == "call_module":
            module: Any = links.parent.get_submodule(str(last.target))
            self.drop: Callable[[Tensor], Tensor] = partial(type(module).forward, module)
        else:
            self.drop = partial(F.dropout, p=rate, training=True)


def _steps(links: Links, name: str) -> _Steps | None:
    """What follows a linear up to a dropout that is awake; None where there is none."""
    if name not in links.linears or name in links.written:
        return None
    nodes, activation = [links.linears[name]], "none"
    while len(nodes[-1].users) == 1:
        here = nodes[-1]
        (user,) = here.users
        rate = dropped_at(links.parent, user, here)
        nodes.append(user)
        if rate is not None and 0.0 < rate < 1.0:
            return _Steps(links, nodes, activation, rate)
        if rate == 0.0:
            continue
        known = links.activation(user, here) if rate is None and activation == "none" else None
        if known is None:
            return None
        activation = known
    return None


def _fusion(
    session: Session, c: Candidate, parent: str, name: str, trace: Fusable, steps: _Steps
) -> Fusion:
    activation, rate = steps.activation, steps.rate

    def layers(x: Tensor, rewritten: Mapping[str, Candidate]) -> Tensor:
        found = rewritten.get(c.fqn)
        if found is not None:
            y, done = found.after(x), found.activation
        elif c.activation == activation:
            y, done = c.before(x), activation
        else:
            y, done = type(c.module).forward(c.module, x), "none"
        return steps.drop(y if done == activation else activation_of(activation).value(y))

    def after(x: Tensor) -> Tensor:
        return linear_dropout(x, *c.weight_and_bias(), activation, rate, c.backend)

    def exact(x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        w = parameters["dW"].t() if c.kind == "conv1d" else parameters["dW"]
        y = activation_of(activation).value(F.linear(x, w, parameters.get("db")))
        return F.dropout(y, rate, True)

    then = "" if activation == "none" else f"{activation} and "
    path = tuple(name.split("."))
    return Fusion(
        rule=RULE,
        fqn=parent,
        module=session.model.get_submodule(parent),
        members=(c,),
        calls=c.calls,
        problems=problems_of(c.module, c.kind, activation, c.calls),
        tensors=c.parameters(),
        layers=layers,
        after=after,
        exact=exact,
        report=_report(c.fqn, then, rate),
        forward=InForward(
            trace,
            steps_after(
                name, len(steps.nodes), call_linear_dropout_of(path, activation, rate, c.backend)
            ),
        ),
        activation=activation,
        dispatch=Dispatch(backend=c.backend),
        competes=False,
        alike=(rate, activation, c.kind, type(c.activation_module).__name__),
        what=f"its linear with {then}dropout",
        title=f"{RULE} of {c.fqn!r}",
    )


def _report(fqn: str, then: str, rate: float) -> Report:
    def message(before_us: float, after_us: float) -> str:
        return (
            f"{fqn!r} and {then}a dropout of {rate:g}: {before_us:.1f} us a call, "
            f"{after_us:.1f} us with the same random numbers, drawn in blocks."
        )

    return Report(
        title=f"linear → {then}dropout",
        message=message,
        advice=None,
        details={"rate": rate, "linears": [fqn]},
        covers=True,
    )
