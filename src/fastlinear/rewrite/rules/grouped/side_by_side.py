"""What findings say of parallel MLPs and of linears of lists: as they are, and a call a layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.cost import Cost
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.in_code import in_code, in_code_together
from fastlinear.rewrite.rules.grouped.advice import LIST, advised, first_problem, report, strided
from fastlinear.rewrite.rules.grouped.modules.forward import parameters_of
from fastlinear.rewrite.rules.grouped.parallel_mlps.find import FoundGroup
from fastlinear.rewrite.rules.grouped.parallel_mlps.forward import Way, fit, parallel_layers
from fastlinear.rewrite.rules.grouped.parallel_mlps.traced import ParallelMLP
from fastlinear.rewrite.rules.grouped.rows.observed import Seen
from fastlinear.rewrite.session import Session


def of_found(
    session: Session, one: FoundGroup, firsts: Mapping[str, Sequence[Seen]], listed: bool
) -> Fusion | None:
    """What there is to measure of parallel MLPs, or of a list where ``listed``. None where nothing
    says that they do not wait for each other, or what they are given; ``firsts`` are the calls of
    the first linear of each."""
    if not one.parallel_mlps:
        return None
    depth = len(one.parallel_mlps[0].linears)
    calls = [firsts.get(linear, ()) for linear in one.linears[::depth]]
    if len(calls) < 2 or not all(calls) or any(0 in made[0].shape for made in calls):
        return None
    seen = [made[0] for made in calls]
    places = [(s.storage, s.offset, s.shape, s.stride) for s in seen]
    there = _there_before(seen) if listed else len(set(places)) == 1
    if seen[0].dtype not in DTYPE_NAMES or (one.unsure and not there):
        return None
    known = {
        p: strided(session, s.shape, s.stride, s.dtype) for p, s in zip(places, seen, strict=True)
    }
    inputs, xs = list(known.values()), [known[place] for place in places]
    every = [session.model.get_submodule(name) for name in one.linears]
    pairs = [parameters_of(every[i::depth]) for i in range(depth)]
    weights, biases = [w for w, _ in pairs], [b for _, b in pairs]
    way = one.way or Way(one.parallel_mlps[0].activations)
    if not fit(xs, weights, biases, way):
        return None
    read = "one input" if len(inputs) == 1 else "inputs of their own"
    words, more, advice = _words(session, one, way, listed, any(b is not None for b in biases[0]))
    told = report(
        session,
        kind=LIST if listed else "parallel_mlps",
        title=f"{words} on {read}",
        words=f"{words.replace('parallel MLPs', 'Sequentials')} on {read}{more} run one after "
        "another",
        advice=advice,
        linears=one.linears,
        cost=_cost(one.parallel_mlps, seen, len(inputs)),
        covers=True,
    )
    if isinstance(one.made, Fusion):
        return replace(one.made, report=told)
    modules = [session.model.get_submodule(name) for name in one.names]
    value = activation_of(way.activations[0] if listed else "none").value

    def given(x: Tensor) -> list[Tensor]:
        return [x if t is inputs[0] else t for t in xs]

    def before(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(value(type(m).forward(m, x)) for m, x in zip(modules, given(x), strict=True))

    def after(x: Tensor) -> tuple[Tensor, ...]:
        return parallel_layers(given(x), weights, biases, way=way)

    sizes = tuple(mlp.sizes for mlp in one.parallel_mlps)
    return advised(
        *(session, told),
        fqn=one.fqn,
        x=inputs[0],
        calls=len(calls[0]),
        input_grad=any(s.grad for s in seen),
        before=before,
        after=after,
        tensors=[p for layer in every for p in layer.parameters() if p.requires_grad],
        problem=first_problem(session, every[0], inputs[0]),
        alike=(sizes, way, tuple((s.shape, s.stride) for s in seen), len(inputs)),
    )


def _there_before(seen: Sequence[Seen]) -> bool:
    """Whether all inputs were there, unwritten since, before the first linear ran: parts of one
    tensor, or tensors that the forward was given."""
    return len({s.storage for s in seen}) == 1 or all(s.given for s in seen)


def _words(
    session: Session, one: FoundGroup, way: Way, listed: bool, bias: bool
) -> tuple[str, str, str]:
    """What they are, what follows each, and what to put in their place."""
    count, equal = len(one.names), len({mlp.sizes for mlp in one.parallel_mlps}) == 1
    if listed:
        held, (act,) = in_code_together(session.model, one.linears), way.activations
        biases = f", [m.bias for m in {held}]" if bias else ""
        named, more = f", activation={act!r}", f", each followed by {act},"
        named, more = ("", "") if act == "none" else (named, more)
        what = f"{count} linears of {'one size' if equal else 'different sizes'}"
        return what, more, f"fl.unequal_linear(xs, [m.weight for m in {held}]{biases}{named})"
    first, last = (in_code(session.model, name) for name in (one.names[0], one.names[-1]))
    named = f"the linears of {first} to {last}"
    advice = f"fl.nn.GroupedLinear.from_linears, one a layer, of {named}"
    if not equal:
        advice = f"fl.unequal_linear, a call a layer, with {named}"
    return f"{count} parallel MLPs of {len(way.activations)} linears", "", advice


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
