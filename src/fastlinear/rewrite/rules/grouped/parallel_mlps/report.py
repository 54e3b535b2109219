"""Parallel MLPs: what they run as they are, and layer by layer as one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from fastlinear.core.cost import Cost
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.in_code import in_code
from fastlinear.rewrite.rules.grouped.advice import advised, first_problem, report, strided
from fastlinear.rewrite.rules.grouped.modules.forward import parameters_of
from fastlinear.rewrite.rules.grouped.parallel_mlps.find import Standing
from fastlinear.rewrite.rules.grouped.parallel_mlps.forward import Way, abreast, fit
from fastlinear.rewrite.rules.grouped.parallel_mlps.traced import ParallelMLP
from fastlinear.rewrite.rules.grouped.rows.observed import Seen
from fastlinear.rewrite.session import Session


def of_parallel_mlps(
    session: Session, one: Standing, firsts: Mapping[str, Sequence[Seen]]
) -> Fusion | None:
    """What there is to measure of parallel MLPs; None where nothing says that they do not wait for
    each other, or what they are given."""
    if not one.parallel_mlps:
        return None
    calls = [firsts.get(linear, ()) for linear in one.linears[:: len(one.parallel_mlps[0].linears)]]
    if not all(calls) or any(0 in made[0].shape for made in calls):
        return None
    seen = [made[0] for made in calls]
    if seen[0].dtype not in DTYPE_NAMES:
        return None
    places = [(s.storage, s.offset, s.shape, s.stride) for s in seen]
    known = {
        p: strided(session, s.shape, s.stride, s.dtype) for p, s in zip(places, seen, strict=True)
    }
    if one.unsure and len(known) > 1:
        return None
    inputs, xs = list(known.values()), [known[place] for place in places]
    modules = [session.model.get_submodule(name) for name in one.names]
    depth = len(one.parallel_mlps[0].linears)
    every = [session.model.get_submodule(name) for name in one.linears]
    pairs = [parameters_of(every[i::depth]) for i in range(depth)]
    weights, biases = [w for w, _ in pairs], [b for _, b in pairs]
    way = one.way or Way(one.parallel_mlps[0].activations)
    if not fit(xs, weights, biases, way):
        return None

    def before(x: Tensor) -> tuple[Tensor, ...]:
        given = zip(modules, (x if t is inputs[0] else t for t in xs), strict=True)
        return tuple(type(m).forward(m, x) for m, x in given)

    def after(x: Tensor) -> tuple[Tensor, ...]:
        return abreast([x if t is inputs[0] else t for t in xs], weights, biases, way=way)

    read = "one input" if len(inputs) == 1 else "inputs of their own"
    told = report(
        session,
        kind="towers",
        title=f"{len(modules)} towers of {depth} linears on {read}",
        words=f"{len(modules)} Sequentials of {depth} linears on {read} run one after another",
        advice=_advice(session.model, one),
        linears=one.linears,
        cost=_cost(one.parallel_mlps, seen, len(inputs)),
        covers=one.linears,
    )
    if isinstance(one.made, Fusion):
        return replace(one.made, report=told)
    sizes = tuple(mlp.sizes for mlp in one.parallel_mlps)
    return advised(
        *(session, told),
        fqn=one.fqn,
        x=inputs[0],
        calls=len(calls[0]),
        input_grad=any(s.grad for s in seen),
        before=before,
        after=after,
        tensors=[p for module in modules for p in module.parameters() if p.requires_grad],
        problem=first_problem(session, every[0], inputs[0]),
        alike=(sizes, way, tuple((s.shape, s.stride) for s in seen), len(inputs)),
    )


def _advice(model: nn.Module, one: Standing) -> str:
    first, last = (in_code(model, name) for name in (one.names[0], one.names[-1]))
    named = f"the linears of {first} to {last}"
    if len({mlp.sizes for mlp in one.parallel_mlps}) > 1:
        return f"fl.unequal_linear, a call a layer, with {named}"
    return f"fl.nn.GroupedLinear.from_linears, one a layer, of {named}"


def _cost(parallel_mlps: Sequence[ParallelMLP], seen: Sequence[Seen], inputs: int) -> Cost:
    """Of the products, and of what no way can leave unread or unwritten: inputs, weights and what
    the last layers give."""
    size, flops, numbers = seen[0].dtype.itemsize, 0.0, 0
    for i, (mlp, s) in enumerate(zip(parallel_mlps, seen, strict=True)):
        tokens = math.prod(s.shape[:-1])
        weights = sum(n * k for n, k in mlp.sizes)
        flops += 2.0 * tokens * weights
        numbers += weights + tokens * mlp.sizes[-1][0]
        numbers += tokens * s.shape[-1] if i < inputs else 0
    return Cost(flops, float(size * numbers))
