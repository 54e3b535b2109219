"""Modules of transformers that hold a mixture's experts in stacks, and one call in their place.

Which token goes to which expert is a router's to say: what a run showed stands for every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.core.errors import InputError
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.problem import Problem
from fastlinear.families.experts import experts
from fastlinear.families.experts.problem import NAME, problem_of
from fastlinear.nn.stacked_experts import WEIGHTS, by_op, has_own_forward, options_of
from fastlinear.rewrite.finding import Told, not_measured
from fastlinear.rewrite.fusion import Dispatch, Fusion, Report, WholeForward
from fastlinear.rewrite.in_code import in_code
from fastlinear.rewrite.match.calls import Kind, SiteCalls
from fastlinear.rewrite.match.candidate import OWN, Candidate, named
from fastlinear.rewrite.match.eligible import refuse_module
from fastlinear.rewrite.session import Session
from fastlinear.rewrite.swap.forwards import Forward, is_hooked, is_traced, overridden
from fastlinear.rewrite.swap.modules import is_rewritten

_BIASES = tuple(f"{name}_bias" for name in WEIGHTS)


@dataclass
class _Seen:
    """Calls of one module in a run: how many, and what the first was given."""

    calls: int = 0
    given: tuple[Tensor, Tensor, Tensor] | None = None


@dataclass
class Matched:
    """The stacked experts of a model.

    Attributes:
        fusions: those that may become one call.
        left: names of the others, and why.
    """

    fusions: list[Fusion] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def find(session: Session) -> list[Fusion]:
    """What may become one call of ``experts``."""
    return session.once(match).fusions


def findings(session: Session) -> list[Told]:
    """One for experts that gain, and one for those that are left alone, with the reason."""
    matched, found = session.once(match), []
    for i, fusion in enumerate(matched.fusions, 1):
        told = session.finding(fusion, len(matched.fusions) - i)
        found += [] if told is None else [told]
    for fqn, why in matched.left.items():
        module = session.model.get_submodule(fqn)
        words = f"{_count(module)} experts run by transformers' {_implementation(module)}"
        title = f"{_count(module)} stacked experts"
        untold = not_measured(NAME, fqn, title, words, why, {"kind": "stacked_experts"})
        found.append(Told(untold))
    return found


def match(session: Session) -> Matched:
    """The stacked experts of a model, which runs once more where there are any."""
    matched = Matched()
    stacks = {fqn: m for fqn, m in session.model.named_modules() if _is_stack(m)}
    seen = _observed(session, stacks) if stacks else {}
    for fqn, module in stacks.items():
        made = _fusion(session, fqn, module, seen[fqn])
        if isinstance(made, str):
            matched.left[fqn] = session.left_alone[fqn] = made
        else:
            matched.fusions.append(made)
    return matched


def _count(module: Any) -> int:
    return int(module.down_proj.shape[0])


def _implementation(module: Any) -> str:
    return str(module.config._experts_implementation or "eager")


def _is_stack(module: nn.Module) -> bool:
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "_experts_implementation") or isinstance(options_of(module), str):
        return False
    if any(not isinstance(getattr(module, name, None), Tensor) for name in WEIGHTS):
        return False
    return not has_own_forward(module) and not is_rewritten(module)


def _observed(session: Session, stacks: Mapping[str, nn.Module]) -> dict[str, _Seen]:
    seen = {fqn: _Seen() for fqn in stacks}

    def look(fqn: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        record = seen[fqn]
        record.calls += 1
        if record.given is None and len(args) == 3 and not options and _is_plain(*args):
            x, index, weight = (a.detach().clone() for a in args)
            record.given = x, index, weight

    handles = [
        module.register_forward_pre_hook(
            lambda _, args, options, fqn=fqn: look(fqn, args, options), with_kwargs=True
        )
        for fqn, module in stacks.items()
    ]
    try:
        session.step("in the run that shows what its experts are given")
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _fusion(session: Session, fqn: str, module: Any, seen: _Seen) -> Fusion | str:
    """The module as one call, or why it is left alone."""
    refused = refuse_module(module)
    if refused is not None:
        return refused.reason
    if session.filter_fn is not None and not session.filter_fn(module, fqn):
        return "filter_fn leaves it out"
    if _has_hooks(module):
        return "its activation carries a hook"
    if seen.given is None:
        return "it does not run, or under autocast, or is called with more than tokens and routes"
    x, index, weight = seen.given
    tensors = {
        name: p for name in (*WEIGHTS, *_BIASES) if (p := getattr(module, name, None)) is not None
    }
    if x.dim() != 2 or x.dtype is not module.down_proj.dtype or x.dtype not in DTYPE_NAMES:
        return f"its tokens are {x.dtype} of shape {tuple(x.shape)}"
    train, options = session.train, options_of(module)
    assert isinstance(options, dict)
    backend = session.backends.get(NAME)
    routes = weight.requires_grad_(train and weight.is_floating_point())
    calls = SiteCalls((Kind(x, seen.calls, train),), None, train)

    def exact(x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        of = {"weight": routes.detach(), **tensors, **parameters}
        wide = [None if (t := of.get(n)) is None else t.to(x.dtype) for n in (*WEIGHTS, *_BIASES)]
        return experts(x, index, of["weight"].to(x.dtype), *wide, **options, backend="eager")  # type: ignore[arg-type]

    problem = _problem(module, (x, index, weight), options, train)
    where = in_code(session.model, fqn)
    advice = f"{where} = fl.nn.Experts.from_module({where})"
    title = f"{_count(module)} stacked experts"

    def message(before_us: float, after_us: float) -> str:
        return (
            f"{where}: {_count(module)} experts take {before_us:.1f} us a call by transformers' "
            f"{_implementation(module)}, {after_us:.1f} us by fastlinear.experts."
        )

    return Fusion(
        rule=NAME,
        fqn=fqn,
        module=module,
        members=(Candidate(fqn, module, OWN, options["activation"], "own", calls, (problem,)),),
        calls=calls,
        problems=(problem,),
        tensors={**tensors, "weight": routes},
        layers=lambda x, _: type(module).forward(module, x, index, routes),
        after=lambda x: by_op(module, options, x, index, routes, backend),
        exact=exact,
        forward=WholeForward(lambda: stacked_forward(module, backend)),
        dispatch=Dispatch(backend=backend),
        alike=(type(module), _implementation(module)),
        report=Report(
            title=title,
            message=message,
            advice=advice,
            details={"kind": "stacked_experts"},
            covers=True,
        ),
        what=f"its {_count(module)} experts",
        title=named(fqn),
    )


def _problem(
    module: Any, given: tuple[Tensor, Tensor, Tensor], options: Mapping[str, Any], train: bool
) -> Problem:
    x, index, weight = given
    weights = [getattr(module, name).detach() for name in WEIGHTS]
    gate_up, down = (w.mT for w in weights) if options["transposed"] else weights
    biases = [getattr(module, name, None) for name in _BIASES]
    routing = index, weight, biases[0], biases[1]
    clamped = options.get("limit") is not None
    how = options["activation"], options["stacked"], clamped, False, train
    return problem_of(x, (gate_up, down), routing, *how)


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module inside, the activation, would show its calls to somebody."""
    return any(is_hooked(m.__dict__) for m in module._modules.values() if m is not None)


def stacked_forward(module: nn.Module, backend: str | None) -> Forward:
    """A forward that makes one call of ``experts`` while the module's gate is known and nobody
    watches; under autocast, and for what ``experts`` refuses, the module's own."""
    original: Any = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self).forward is original and len(args) == 3 and not kwargs and _is_plain(*args):
            options = options_of(self)
            seen = overridden() or is_traced() or _has_hooks(self)
            if not isinstance(options, str) and not seen:
                with suppress(InputError):  # the module says what is wrong, or takes it
                    return by_op(self, options, *args, backend)
        return type(self).forward(self, *args, **kwargs)

    return forward


def _is_plain(*given: Any) -> bool:
    """Whether these are tensors, outside autocast."""
    tensors = all(isinstance(t, Tensor) for t in given)
    return tensors and not torch.is_autocast_enabled(given[0].device.type)
