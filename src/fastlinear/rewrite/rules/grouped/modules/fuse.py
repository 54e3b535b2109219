"""A module that computes a grouped linear layer, as one call of ``grouped_linear``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.problem import Problem
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import reference
from fastlinear.families.grouped.problem import NAME
from fastlinear.families.grouped.selection import problem_of
from fastlinear.profile.graph import Observed
from fastlinear.rewrite.fusion import Dispatch, Fusion, WholeForward
from fastlinear.rewrite.match.calls import SiteCalls
from fastlinear.rewrite.match.candidate import Candidate, named
from fastlinear.rewrite.rules.grouped.modules.forward import (
    CHANNELS_LAST,
    LINEARS,
    Grouped,
    Parameters,
    call_grouped,
    grouped_forward,
    lies_channels_last,
)


def fused_group(
    fqn: str,
    module: nn.Module,
    members: tuple[Candidate, ...],
    grouped: Grouped,
    observed: Observed,
    calls: SiteCalls,
    backend: str | None,
) -> Fusion:
    """A convolution, a module with weights of its own, or a loop over linears, as one call.

    Args:
        fqn, module: the module whose forward is swapped.
        members: the linears of a loop, else the module itself.
        grouped: how the module computes a grouped linear layer.
        observed: its arguments in one call: one tensor.
        calls: how it was called.
        backend: a forced backend of grouped_linear, or None.
    """
    loop = grouped.kind == LINEARS

    def held() -> Parameters:
        found = grouped.parameters(module)
        assert found is not None
        return found

    def problem(x: Tensor) -> Problem:
        dtype, layout = calls.autocast, grouped.layout
        weight, bias = (None if t is None else t.detach() for t in held())
        assert weight is not None
        if dtype is not None:
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        if lies_channels_last(x, grouped):
            x, layout = x.movedim(1, -1), CHANNELS_LAST
        rows = layouts.blocks(x, layout, grouped.groups, grouped.k)
        order = layouts.order_of(layout, x.shape)
        return problem_of(rows, weight, bias, grouped.activation, order, calls.grad)

    def original(x: Tensor) -> Tensor:
        y: Tensor = type(module).forward(module, x)
        return y

    def layers(x: Tensor, rewritten: Mapping[str, Candidate]) -> Tensor:
        if not loop:
            return original(x)
        layout = layouts.LAYOUTS[grouped.layout]
        where = 1 if layout.order == "channels" else -1
        wide = x.unflatten(where, (grouped.groups, grouped.k)) if layout.merged else x
        axis = {"tokens": -2, "groups": 0, "channels": 1}[layout.order]
        value, found = activation_of(grouped.activation).value, []
        for member, part in zip(members, wide.unbind(axis), strict=True):
            known = rewritten.get(member.fqn)
            last = part if layout.order != "channels" else part.movedim(1, -1)
            if known is None:
                y, done = type(member.module).forward(member.module, last), "none"
            else:
                y, done = known.after(last), known.activation
            y = y if done != "none" else value(y)
            found.append(y if layout.order != "channels" else y.movedim(-1, 1))
        return torch.cat(found, where) if layout.merged else torch.stack(found, axis)

    def exact(x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        if loop:
            count = range(len(members))
            weight = torch.stack([parameters[f"{i}.dW"] for i in count])
            bias = None
            if "0.db" in parameters:
                bias = torch.stack([parameters[f"{i}.db"] for i in count])
        else:
            weight, bias = grouped.views(parameters["dW"], parameters.get("db"))
        return reference.grouped_linear(x, weight, bias, grouped.activation, grouped.layout)

    own = {"dW": grouped.weight, "db": grouped.bias}
    return Fusion(
        rule=NAME,
        fqn=fqn,
        module=module,
        members=members,
        calls=calls,
        problems=tuple(problem(k.x) for k in calls.kinds),
        tensors=None if loop else {t: getattr(module, n) for t, n in own.items() if n is not None},
        layers=layers,
        original=original,
        after=lambda x: call_grouped(x, *held(), grouped, backend),
        exact=exact,
        forward=WholeForward(lambda: grouped_forward(module, grouped, observed, backend)),
        dispatch=Dispatch(backend=backend),
        alike=(type(module), grouped.kind, grouped.layout, grouped.turned),
        what=f"its {grouped.groups} {'linears' if loop else 'groups'}",
        title=named(fqn),
    )
