"""Parallel MLPs: what they run as they are, and layer by layer as one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from fastlinear.core.cost import Cost
from fastlinear.rewrite.evaluate.groups_units import Unit, strided
from fastlinear.rewrite.in_code import in_code
from fastlinear.rewrite.match.parallel_mlps import ParallelMLP
from fastlinear.rewrite.rules.grouped.parallel_mlps.find import Standing
from fastlinear.rewrite.rules.grouped.rows.observed import Seen
from fastlinear.rewrite.swap.grouped_forward import parameters_of
from fastlinear.rewrite.swap.parallel_mlps_forward import Way, abreast, fit
from fastlinear.rewrite.work import Work


def of_parallel_mlps(
    work: Work, one: Standing, firsts: Mapping[str, Sequence[Seen]]
) -> Unit | None:
    """What there is to measure of parallel MLPs; None where nothing says that they do not wait for
    each other, or what they are given."""
    if not one.parallel_mlps:
        return None
    calls = [firsts.get(linear, ()) for linear in one.linears[:: len(one.parallel_mlps[0].linears)]]
    if not all(calls) or any(0 in made[0].shape for made in calls):
        return None
    seen = [made[0] for made in calls]
    places = [(s.storage, s.offset, s.shape, s.stride) for s in seen]
    known = {
        p: strided(work, s.shape, s.stride, s.dtype) for p, s in zip(places, seen, strict=True)
    }
    if one.unsure and len(known) > 1:
        return None
    inputs, xs = list(known.values()), [known[place] for place in places]
    modules = [work.model.get_submodule(name) for name in one.names]
    depth = len(one.parallel_mlps[0].linears)
    every = [work.model.get_submodule(name) for name in one.linears]
    pairs = [parameters_of(every[i::depth]) for i in range(depth)]
    weights, biases = [w for w, _ in pairs], [b for _, b in pairs]
    way = one.way or Way(one.parallel_mlps[0].activations)
    if not fit(xs, weights, biases, way):
        return None

    def before() -> list[Tensor]:
        return [type(m).forward(m, x) for m, x in zip(modules, xs, strict=True)]

    def after() -> list[Tensor]:
        return list(abreast(xs, weights, biases, way=way))

    own = [p for module in modules for p in module.parameters() if p.requires_grad]
    leaves = [inputs[0], *inputs[1:], *own]
    read = "one input" if len(inputs) == 1 else "inputs of their own"
    return Unit(
        before=before,
        after=after,
        leaves_before=leaves,
        leaves_after=leaves,
        cost=_cost(one.parallel_mlps, seen, len(inputs)),
        calls=len(calls[0]),
        fqn=one.fqn,
        kind="towers",
        title=f"{len(modules)} towers of {depth} linears on {read}",
        words=f"{len(modules)} Sequentials of {depth} linears on {read} run one after another",
        advice=_advice(work.model, one),
        dtype=seen[0].dtype,
        sites=one.linears,
        input_grad=any(s.grad for s in seen),
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
