"""What a gated MLP keeps between forward and backward: as the model runs it, and by
``gated_mlp``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.dispatch.explain import mib
from fastlinear.families.gated.saved_memory import account, way_of
from fastlinear.families.gated.stacking import Needs
from fastlinear.rewrite.rules.gated.modules import GatedSite


def needs_of(site: GatedSite, input_grad: bool) -> Needs:
    """Which gradients a step wants of it."""
    with torch.enable_grad():  # a turned weight's view says what the weight says
        weights, biases = site.held
    given = (t is not None and t.requires_grad for t in (*weights, *biases))
    return (input_grad, *given)  # type: ignore[return-value]


def saved_by(run: Callable[[], object], parameters: Iterable[Tensor]) -> int:
    """Bytes of all that autograd saves while it runs, the parameters left out."""
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    own = {p.untyped_storage().data_ptr() for p in parameters}
    return sum(size for where, size in found.items() if where not in own)


def told(
    problem: Problem, needs: Needs, backends: Mapping[str, str], before: int | None
) -> tuple[str, dict[str, Any]]:
    """One sentence, and the same as data; nothing where nothing is differentiated.

    Args:
        problem: the call's.
        needs: which gradients the step wants.
        backends: piece → backend that is chosen.
        before: what the module keeps as it is, in bytes, or None where it was not run.
    """
    if not (problem.needs_grad and any(needs)):
        return "", {}
    taken, *others = account(problem, needs, way_of(backends, None))
    also = ", ".join(f"{mib(k.bytes)} with {k.way}" for k in others)
    ours = f"by gated_mlp {mib(taken.bytes)} ({taken.way}; {also})"
    first = "" if before is None else f"{mib(before)} as it is, "
    levels = {k.way: k.bytes for k in (taken, *others)}
    data = {"before": before, "after": taken.bytes, "way": taken.way, "ways": levels}
    return f"Kept between its forward and backward: {first}{ours}. ", {"kept_bytes": data}
