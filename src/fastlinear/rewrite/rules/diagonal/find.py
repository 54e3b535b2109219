"""Where a model computes what ``diagonal_linear`` would: a module, or a sequence of ops."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.families.diagonal import reference
from fastlinear.families.diagonal.op import diagonal_linear
from fastlinear.families.diagonal.problem import NAME, STEP, problem_of
from fastlinear.profile.step import is_compiled
from fastlinear.rewrite.fusion import Fusion, Report
from fastlinear.rewrite.in_code import in_code
from fastlinear.rewrite.match.calls import Kind, SiteCalls
from fastlinear.rewrite.rules.diagonal import modules
from fastlinear.rewrite.rules.diagonal.modules import Diagonal, vector, written
from fastlinear.rewrite.rules.diagonal.sequences import Sequence, Watch
from fastlinear.rewrite.session import Session


@dataclass
class _Seen:
    """Calls of one module in a run: how many, and the first input."""

    calls: int = 0
    x: Tensor | None = None


def find(session: Session) -> list[Fusion]:
    """The diagonal modules of a model, and its elementwise sequences. The model runs once more."""
    model, train = session.model, session.train
    sites = modules.match(model)
    seen, sequences = _observed(session, sites)
    # a sequence that lies in a module is part of what that computes; a module whose result a
    # sequence goes on with is part of that
    known = {d.fqn for d in sites}
    sequences = [s for s in sequences if s.span != s.fqn or s.fqn not in known]
    inside = {s.fqn for s in sequences}
    found = [of_sequence(model, s, train) for s in sequences]
    for site in sites:
        x, calls = seen[site.fqn].x, seen[site.fqn].calls
        if site.fqn not in inside and x is not None:
            found.append(_of_module(model, site, x, calls, train))
    return [f for f in found if f is not None]


def _observed(session: Session, sites: list[Diagonal]) -> tuple[dict[str, _Seen], list[Sequence]]:
    """One run with hooks on the sites, and with every op of its forward watched."""
    seen = {site.fqn: _Seen() for site in sites}

    def look(fqn: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        record = seen[fqn]
        record.calls += 1
        if record.x is None and len(args) == 1 and isinstance(args[0], Tensor):
            record.x = args[0].detach().clone()

    handles = [s.module.register_forward_pre_hook(partial(look, s.fqn)) for s in sites]
    unwatched = any(
        is_compiled(m) or isinstance(m, torch.jit.ScriptModule) for m in session.model.modules()
    )
    watch = None if unwatched else Watch(session.model)
    try:
        with nullcontext() if watch is None else watch:
            session.step("in the run that shows what its layers are given")
    finally:
        for handle in handles:
            handle.remove()
    return seen, [] if watch is None else watch.sequences()


def _of_module(
    model: nn.Module, site: Diagonal, x: Tensor, calls: int, train: bool
) -> Fusion | None:
    """A module, called so often, first with x; None where autocast or promotion decides what is
    computed."""
    weight: Tensor = getattr(site.module, site.weight)
    bias: Tensor | None = None if site.bias is None else getattr(site.module, site.bias)
    if x.shape[-1] != site.features or x.dtype != weight.dtype:
        return None
    scale = site.scale()
    before: Callable[[Tensor], Tensor] = partial(type(site.module).forward, site.module)
    if site.in_place:  # over and over on the same x it would leave nothing of it
        before = _ops(weight, bias, site.minus, site.activation, True, None)
    what = _WHAT[site.kind].format(name=type(site.module).__name__, k=site.features)
    advice = site.advice(in_code(model, site.fqn))
    given = weight, bias, None, scale
    how = site.kind, site.activation, what, advice
    return _fusion(site.fqn, site.module, x, calls, given, how, train, before, site.instead(scale))


def of_sequence(model: nn.Module, s: Sequence, train: bool) -> Fusion | None:
    """A sequence; None as of a module."""
    weight = model.get_parameter(s.weight)
    bias = None if s.bias is None else model.get_parameter(s.bias)
    if s.x.dtype != weight.dtype:
        return None
    residual = torch.randn_like(s.x).requires_grad_(train) if s.residual else None

    def after(x: Tensor) -> Tensor:
        w, b = vector(weight), None if bias is None else vector(bias, s.minus)
        return diagonal_linear(x, w, b, activation=s.activation, residual=residual)

    steps = ["scales" if bias is None else "scales and shifts"]
    steps += [] if s.activation == "none" else [f"takes {s.activation} of"]
    what = f"{' and '.join(steps)} {weight.shape[-1]} features"
    what += ", and adds a residual," if s.residual else ""
    where = in_code(model, s.span) if s.span else "the model"
    act = "" if s.activation == "none" else f", activation={s.activation!r}"
    scale, shift = written(in_code(model, s.weight), weight), ""
    if s.bias is not None and bias is not None:
        shift = f", {written(in_code(model, s.bias), bias, s.minus)}"
    rest = ", residual=residual" if s.residual else ""
    before = _ops(weight, bias, s.minus, s.activation, s.in_place, residual)
    given = weight, bias, residual, weight
    what = f"{where} {what} in {s.ops} ops"
    how = SEQUENCE, s.activation, what, f"fl.diagonal_linear(x, {scale}{shift}{act}{rest})"
    module = model.get_submodule(s.fqn)
    return _fusion(s.fqn, module, s.x, s.calls, given, how, train, before, after)


def _fusion(
    fqn: str,
    module: nn.Module,
    x: Tensor,
    calls: int,
    given: tuple[Tensor, Tensor | None, Tensor | None, Tensor],
    how: tuple[str, str, str, str],
    train: bool,
    before: Callable[[Tensor], Tensor],
    after: Callable[[Tensor], Tensor],
) -> Fusion | None:
    """One call of ``diagonal_linear``; None of a dtype that it does not take.

    Args:
        fqn, module: where it begins.
        x, calls: its first input, and how often it is called in a step.
        given: weight, bias and residual as the model has them, and the weight as ``after`` has it.
        how: kind, activation, what the model does, and what to put in its place.
        train: whether steps have a backward.
        before, after: the model's ops on x, and the one call.
    """
    if x.dtype not in DTYPE_NAMES:
        return None
    weight, bias, residual, scale = given
    kind, activation, what, advice = how
    tensors = {"dW": weight, "db": bias, "dr": residual, "ds": None if scale is weight else scale}
    problem = problem_of(x, bias, residual, activation, train)
    rest = "" if residual is not None else _RESIDUAL
    title = f"{kind.replace('_', ' ')} of {weight.shape[-1]} features"

    def message(before_us: float, after_us: float) -> str:
        return (
            f"{what}: {before_us:.1f} us a call, {after_us:.1f} us by diagonal_linear, which "
            f"passes over memory once. Replace it with {advice}{rest}."
        )

    details = {"kind": kind, "activation": activation, "residual": residual is not None}
    return Fusion(
        rule=NAME,
        fqn=fqn,
        module=module,
        names=(fqn,),
        calls=SiteCalls((Kind(x, calls, train),), None, train),
        problems=(problem.with_piece(STEP) if train else problem,),
        tensors={name: t for name, t in tensors.items() if t is not None},
        layers=lambda x, _: before(x),
        after=after,
        report=Report(title=title, message=message, advice=advice, details=details),
        activation=activation,
        alike=(kind, fqn if kind != SEQUENCE else ""),
    )


def _ops(
    weight: Tensor,
    bias: Tensor | None,
    minus: bool,
    activation: str,
    in_place: bool,
    residual: Tensor | None,
) -> Callable[[Tensor], Tensor]:
    """PyTorch's ops as a model runs them; a product over x goes to memory that is there as well,
    and leaves x as it is. In training autograd keeps a copy of such an x: it is no cheaper then."""
    kept: list[Tensor] = []

    def run(x: Tensor) -> Tensor:
        if in_place and not torch.is_grad_enabled():
            if not kept:
                kept.append(torch.empty_like(x))
            y = torch.mul(x, weight, out=kept[0])
        else:
            y = x * weight
        if bias is not None:
            y = y - bias if minus else y + bias
        y = reference.activated(y, activation)
        return y if residual is None else residual + y

    return run


SEQUENCE = "sequence"
_RESIDUAL = "; a residual added to its result costs no further pass there"
_WHAT = {
    modules.LAYER_SCALE: "{name} scales {k} features",
    modules.AFFINE: "{name} scales and shifts {k} features",
    modules.LINEAR: "The weight is exactly diagonal: {k} numbers do the work of {k} x {k}",
}
