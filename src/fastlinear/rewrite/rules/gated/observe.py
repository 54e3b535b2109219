"""Gated MLPs as one run of the model calls them, and what a call of each runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.problem import Problem
from fastlinear.core.wrappers import PLAIN
from fastlinear.families.gated.problem import NAME
from fastlinear.families.gated.selection import problem_of
from fastlinear.families.gated.stacking import Needs
from fastlinear.profile.timeline import Timeline, timeline
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.match.calls import Kind, Results, SiteCalls
from fastlinear.rewrite.rules.gated.modules import GatedSite
from fastlinear.rewrite.rules.gated.saved_memory import needs_of, saved_by
from fastlinear.rewrite.rules.gated.watch import Watch
from fastlinear.rewrite.session import Session


@dataclass
class Seen:
    """Calls of one gated MLP in a run: how many, the first input, and whether its gradient is
    wanted."""

    calls: int = 0
    x: Tensor | None = None
    grad: bool = False


@dataclass(frozen=True, eq=False)
class Called:
    """A gated MLP on an input of the model's.

    Attributes:
        site, x, calls: it, its first input, and how often a step calls it.
        problem: of that call.
        needs: which gradients the step wants of it.
        fusion: what is measured of it; None where one call would not do the same.
    """

    site: GatedSite
    x: Tensor
    calls: int
    problem: Problem
    needs: Needs
    fusion: Fusion | None

    @property
    def kind(self) -> tuple[Any, ...]:
        """Those of one kind run the same."""
        site = self.site
        return (self.problem, site.part, site.glu, site.opened and site.opened.alike, self.needs)

    def timelines(self, device: torch.device) -> dict[str, Timeline]:
        """What one call runs as it is, and as one."""
        fusion = self.fusion
        assert fusion is not None
        units = {"before": self._unit(fusion.before), "after": self._unit(fusion.after)}
        with torch.set_grad_enabled(self.problem.needs_grad):
            return {name: timeline(unit, device) for name, unit in units.items()}

    def saved_bytes(self) -> int:
        """What it keeps for its backward as it is."""
        with torch.enable_grad():
            return saved_by(lambda: self.site.before(self.x), self.site.parameters)

    def _unit(self, run: Callable[[Tensor], Results]) -> Callable[[], Any]:
        wanted = [t for t in (self.x, *self.site.parameters) if t.requires_grad]
        if not (self.problem.needs_grad and wanted):
            return lambda: run(self.x)

        def step() -> Any:
            y = run(self.x)
            assert isinstance(y, Tensor)
            return torch.autograd.grad(y, wanted, torch.ones_like(y), allow_unused=True)

        return step


def observed(session: Session, sites: list[GatedSite], watch: Watch) -> dict[GatedSite, Seen]:
    """One forward, watched, with hooks on the sites: of a part of a forward, on its first linear,
    or on products with that one's weight.

    No backward, in which a checkpoint would run its part again, and otherwise.
    """
    seen = {site: Seen() for site in sites}

    def look(site: GatedSite, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record, given = seen[site], (*args, *kwargs.values())
        record.calls += 1
        if record.x is None and len(given) == 1 and type(given[0]) is Tensor:
            record.x, record.grad = given[0].detach().clone(), given[0].requires_grad

    handles = []
    for site in sites:
        if site.gated.gate in site.written:
            watch.on_product(site.weights[0], partial(look, site))
            continue
        called = site.layers[0] if site.part else site.module
        handles.append(called.register_forward_pre_hook(partial(look, site), with_kwargs=True))
    try:
        # parts that are compiled would have the watching compiled as well
        with torch.compiler.set_stance("force_eager"), watch:
            session.forward("in the run that shows what its layers are given")
    finally:
        for handle in handles:
            handle.remove()
    return seen


def called(session: Session, site: GatedSite, seen: Seen) -> Called | None:
    """A site as the run called it; None where ``gated_mlp`` does not take what it was given."""
    x = seen.x
    if x is None or not _plain(site, x):
        return None
    weights, biases = site.held
    gated, train, after = site.gated, session.train, site.instead()
    rows = x.reshape(-1, x.shape[-1])
    order = gated.activation, gated.order, None
    problem = problem_of(rows, weights, biases, *order, train)
    needs = needs_of(site, seen.grad)
    fusion = next((f for f in session.found if (f.rule, f.names) == (NAME, site.names)), None)
    if after is not None and fusion is None:
        fusion = _fusion(site, problem, Kind(x, seen.calls, seen.grad), needs, after)
    x.requires_grad_(train and seen.grad)
    return Called(site, x, seen.calls, problem, needs, None if after is None else fusion)


def _fusion(
    site: GatedSite, problem: Problem, kind: Kind, needs: Needs, after: Callable[[Tensor], Tensor]
) -> Fusion:
    """What is measured of one that nothing has tried to put in place."""

    def layers(x: Tensor, _: Mapping[str, Any]) -> Tensor:
        return site.before(x)

    return Fusion(
        rule=NAME,
        fqn=site.fqn,
        module=site.module,
        names=site.names,
        calls=SiteCalls((kind,), None, problem.needs_grad and any(needs)),
        problems=(problem,),
        tensors={str(i): t for i, t in enumerate(site.parameters)},
        layers=layers,
        after=after,
        alike=(site.part, site.glu, site.opened and site.opened.alike, needs),
    )


def _plain(site: GatedSite, x: Tensor) -> bool:
    """Whether ``gated_mlp`` takes the module's parameters with this input."""
    dtypes = {p.dtype for p in site.parameters}
    if any(type(p) not in PLAIN for p in site.parameters):
        return False
    return bool(x.numel()) and x.dtype in DTYPE_NAMES and dtypes == {x.dtype}
