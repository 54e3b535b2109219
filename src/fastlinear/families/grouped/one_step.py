"""The record of a family whose rows differ by group, and whose training call is one step.

A backward takes what its own forward left, so that both are chosen together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fastlinear.core.cost import Cost
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.dispatch.backend import Backend, Family, deferred
from fastlinear.dispatch.space import Space
from fastlinear.families.grouped.problem import STEP

PIECES = ("forward", STEP)
Served = tuple[str, Callable[[Problem], str | None], tuple[str, ...]]
"""A backend: its name, why it cannot serve a Problem, and its sources."""


def family(
    name: str,
    home: str,
    *,
    space: Space,
    backends: Sequence[Served],
    make_inputs: Callable[..., tuple[Any, ...]],
    on_request: Collection[str] = (BATCH_INVARIANT,),
) -> Family:
    """The record, of backends that ``home``'s module ``spec`` names ``<backend>_<piece>``.

    Args:
        home: the package, with modules ``spec`` and ``command``.
        backends: one of them is ``"eager"``.
        on_request: names of those that are taken only where the caller asks for them.
    """

    def reference(p: Problem, inputs: tuple[Any, ...]) -> Any:
        return deferred(f"{home}.spec:eager_{p.piece}")(*inputs)

    def examples(facts: Mapping[str, Any]) -> Mapping[str, Problem]:
        return {"": space.problem("forward", 512, 8, 256, 256, **facts)}

    return Family(
        name=name,
        pieces=PIECES,
        backends=tuple(
            Backend(
                *(name, piece, backend, f"{home}.spec:{backend}_{piece}", reason_not, sources),
                on_request=backend in on_request,
            )
            for piece in PIECES
            for backend, reason_not, sources in backends
        ),
        make_inputs=make_inputs,
        reference=reference,
        cost=cost,
        cpu_work=deferred("fastlinear.families.grouped.cpu_work:work"),
        gpu_work=deferred("fastlinear.families.grouped.gpu_work:work"),
        examples=examples,
        space=space,
        command=f"{home}.command:COMMAND",
        cold=True,
        timed=deferred(f"{home}.spec:timed"),
    )


def cost(p: Problem) -> Cost:
    """Least flops and bytes of groups of the mean size: every tensor once."""
    m, groups, k, n = (p.dim(name) for name in ("M", "G", "K", "N"))
    weights = dict(p.dims).get("KN", k * n)
    size = FLOAT_DTYPES[p.dtype].itemsize
    parameters = groups * (weights + n * (p.option("bias") != "no"))
    flops = 2.0 * m * weights
    if p.piece == "forward":
        return Cost(flops, size * (m * (k + n) + parameters))
    return Cost(3 * flops, size * (m * (3 * k + 2 * n) + 3 * parameters))
