"""What findings say of modules that are a grouped layer by themselves."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.in_code import in_code, in_code_together
from fastlinear.rewrite.match.calls import SiteCalls
from fastlinear.rewrite.rules.grouped.advice import cost_of, report
from fastlinear.rewrite.rules.grouped.modules.forward import CONVOLUTION, LINEARS
from fastlinear.rewrite.rules.grouped.modules.fuse import fused_group
from fastlinear.rewrite.rules.grouped.modules.recognise import Whole
from fastlinear.rewrite.session import Session


def of_module(
    session: Session, match: Whole, seen: SiteCalls, found: Fusion | None
) -> Fusion | None:
    """A module that is a grouped layer; ``found`` is the fusion that may be put in place."""
    module, how = match.module, match.grouped
    x = seen.kinds[0].x
    weight, _ = match.parameters()
    alike = (x.dtype, x.device) == (weight.dtype, weight.device)
    if not alike or x.dtype not in DTYPE_NAMES or seen.autocast is not None:
        return None  # autocast decides there what is computed
    groups, n, k = weight.shape
    tokens = x.numel() // (groups * k)
    cost = cost_of(tokens, x.numel(), groups * n * k, groups * n, x.element_size())
    words = f"{type(module).__name__} multiplies {groups} groups by weights of their own"
    if how.kind == CONVOLUTION:
        words = f"{type(module).__name__} of {groups} groups over one position"
    elif how.kind == LINEARS:
        words = f"{groups} linears on parts of one tensor run one after another"
    title = f"{groups} groups of {k} to {n} features"
    told = report(
        session,
        kind=how.kind,
        title=title,
        words=words,
        advice=_advice(session.model, match),
        linears=match.members or (match.fqn,),
        cost=cost,
    )
    if found is not None:
        return replace(found, report=told)
    observed = session.arguments[module]
    made = fused_group(match.fqn, module, (), how, observed, seen, None)
    own = {n: p for n, p in module.named_parameters() if p.requires_grad}
    return replace(
        made, names=match.members or (match.fqn,), tensors=own, forward=None, report=told
    )


def _advice(model: nn.Module, match: Whole) -> str:
    """The line that puts one in the module's place."""
    module, how, called = match.module, match.grouped, in_code(model, match.fqn)
    if how.kind == CONVOLUTION and isinstance(module, nn.Conv1d):
        return f"fl.nn.GroupedLinear.from_conv1d({called})"
    if how.kind == CONVOLUTION and isinstance(module, nn.Conv2d):
        return f"fl.nn.GroupedLinear.from_conv2d({called})"
    act = "" if how.activation == "none" else f", activation={how.activation!r}"
    layout = f", layout={how.layout!r})"
    if how.kind == LINEARS:
        layers = in_code_together(model, match.members)
        made = f"fl.nn.GroupedLinear.from_linears({layers}{act}{layout}"
        return f"{made}, whose weight[g] is the weight of layer g"
    view = f"{called}.{how.weight}{'.transpose(1, 2)' if how.turned else ''}"
    if how.kind == CONVOLUTION:
        view = f"{called}.weight.view({how.groups}, {how.n}, {how.k})"
    held = "" if how.bias is None else f", bias of shape ({how.groups}, {how.n})"
    return f"fl.grouped_linear(x, {view}{held}{act}{layout}"
