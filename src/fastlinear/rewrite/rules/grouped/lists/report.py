"""Linears of lists, of any sizes: what they run one by one, and as one call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fastlinear.core.cost import Cost
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.in_code import in_code_together
from fastlinear.rewrite.rules.grouped.advice import LIST, advised, first_problem, report, strided
from fastlinear.rewrite.rules.grouped.modules.forward import parameters_of
from fastlinear.rewrite.rules.grouped.parallel_mlps.find import Standing
from fastlinear.rewrite.rules.grouped.parallel_mlps.forward import LISTS, Way, abreast, fit
from fastlinear.rewrite.rules.grouped.rows.observed import Seen
from fastlinear.rewrite.session import Session


def of_list(session: Session, one: Standing, firsts: Mapping[str, Sequence[Seen]]) -> Fusion | None:
    """What there is to measure; None where nothing says that they do not wait for each other, or
    what they are given."""
    calls = [firsts.get(linear, ()) for linear in one.linears]
    if len(calls) < 2 or not all(calls) or any(0 in made[0].shape for made in calls):
        return None
    seen = [made[0] for made in calls]
    if seen[0].dtype not in DTYPE_NAMES:
        return None
    if one.unsure and not _there_before(seen):
        return None
    places = [(s.storage, s.offset, s.shape, s.stride) for s in seen]
    known = {
        p: strided(session, s.shape, s.stride, s.dtype) for p, s in zip(places, seen, strict=True)
    }
    inputs, xs = list(known.values()), [known[place] for place in places]
    modules = [session.model.get_submodule(name) for name in one.linears]
    weights, biases = parameters_of(modules)
    way = Way(one.parallel_mlps[0].activations, LISTS)
    if not fit(xs, [weights], [biases], way):
        return None
    value = activation_of(way.activations[0]).value

    def before(x: Tensor) -> tuple[Tensor, ...]:
        given = zip(modules, (x if t is inputs[0] else t for t in xs), strict=True)
        return tuple(value(type(m).forward(m, x)) for m, x in given)

    def after(x: Tensor) -> tuple[Tensor, ...]:
        return abreast([x if t is inputs[0] else t for t in xs], [weights], [biases], way=way)

    read = "one input" if len(inputs) == 1 else "inputs of their own"
    sizes = tuple(mlp.sizes for mlp in one.parallel_mlps)
    size = "one size" if len(set(sizes)) == 1 else "different sizes"
    act = "" if way.activations[0] == "none" else f", each followed by {way.activations[0]},"
    told = report(
        session,
        kind=LIST,
        title=f"{len(modules)} linears of {size} on {read}",
        words=f"{len(modules)} linears of {size} on {read}{act} run one after another",
        advice=_advice(session, one, way.activations[0], any(b is not None for b in biases)),
        linears=one.linears,
        cost=_cost(one, seen, len(inputs)),
        covers=one.linears,
    )
    if isinstance(one.made, Fusion):
        return replace(one.made, report=told)
    return advised(
        *(session, told),
        fqn=one.fqn,
        x=inputs[0],
        calls=len(calls[0]),
        input_grad=any(s.grad for s in seen),
        before=before,
        after=after,
        tensors=[p for module in modules for p in module.parameters() if p.requires_grad],
        problem=first_problem(session, modules[0], inputs[0]),
        alike=(sizes, way, tuple((s.shape, s.stride) for s in seen), len(inputs)),
    )


def _there_before(seen: Sequence[Seen]) -> bool:
    """Whether all inputs were there, unwritten since, before the first linear ran: parts of one
    tensor, or tensors that the forward was given."""
    return len({s.storage for s in seen}) == 1 or all(s.given for s in seen)


def _advice(session: Session, one: Standing, activation: str, bias: bool) -> str:
    held = in_code_together(session.model, one.linears)
    biases = f", [m.bias for m in {held}]" if bias else ""
    act = "" if activation == "none" else f", activation={activation!r}"
    return f"fl.unequal_linear(xs, [m.weight for m in {held}]{biases}{act})"


def _cost(one: Standing, seen: Sequence[Seen], inputs: int) -> Cost:
    """Of the products, and of inputs, weights and results, each moved once."""
    size, flops, numbers = seen[0].dtype.itemsize, 0.0, 0
    for i, (mlp, s) in enumerate(zip(one.parallel_mlps, seen, strict=True)):
        ((n, k),), tokens = mlp.sizes, math.prod(s.shape[:-1])
        flops += 2.0 * tokens * n * k
        numbers += n * k + tokens * n + (tokens * k if i < inputs else 0)
    return Cost(flops, float(size * numbers))
