"""One site alone: run as the model did and as the rewrite does, compared and timed."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fastlinear.core.compare import Verdict
from fastlinear.core.timing import Samples, interleave
from fastlinear.fastpath import autograd_node, lookup
from fastlinear.rewrite.evaluate.measure import Pair
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.match.calls import Kind, Results
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.verify.kinks import Sides, following
from fastlinear.rewrite.verify.running import seed_all
from fastlinear.rewrite.verify.verdicts import compare

_ROUNDS = 31
_MAX_S = 2.0
_SEED = 0  # before each run: all draw the same numbers

Unit = Candidate | Fusion
Run = Callable[[Tensor], Results]
Arm = Callable[[], dict[str, Tensor]]


def failure(candidate: Unit) -> Verdict | None:
    """The first failed comparison of one site, over every kind of input it was seen with.

    Output and, where the model differentiates it, dx, dW and db, against the float64 reference
    on PyTorch's side of the activation's kink; what fails, on the rewrite's own side.
    """
    for kind in candidate.calls.kinds:
        own, torchs = Sides(), Sides()
        device = kind.x.device
        seed_all(_SEED, device)
        with own:
            ours = _arm(candidate, kind, candidate.after)()
        seed_all(_SEED, device)
        with torchs:
            theirs = _arm(candidate, kind, candidate.before)()

        def oracle(kind: Kind = kind) -> dict[str, Tensor]:
            seed_all(_SEED, kind.x.device)
            return _oracle(candidate, kind)

        exact = following(torchs.outputs, torchs.outputs, oracle) or oracle()
        failed = _first_failure(candidate.fqn, ours, theirs, exact, exact)
        if failed is not None and torchs.outputs:
            own_exact = following(torchs.outputs, own.outputs, oracle)
            if own_exact is not None:
                failed = _first_failure(candidate.fqn, ours, theirs, own_exact, exact)
        if failed is not None:
            return failed
    return None


def _first_failure(
    fqn: str,
    ours: dict[str, Tensor],
    theirs: dict[str, Tensor],
    exact: dict[str, Tensor],
    exact_theirs: dict[str, Tensor],
) -> Verdict | None:
    verdicts = (
        compare(f"{fqn}.{n}".lstrip("."), ours[n], theirs[n], exact[n], 0.0, exact_theirs[n])
        for n in exact
    )
    return next((v for v in verdicts if not v.passed), None)


def pair(candidate: Candidate, device: torch.device, budget_s: float) -> tuple[Pair, int]:
    """A/B of one site: the model's own forward against the rewritten one; see ``times``.

    A gain without the compiled fast path stays one with it. Where there is none while that is being
    compiled, it is waited for, and both are timed again.
    """
    runs = {"before": candidate.before, "after": candidate.after}
    compiling = lookup.is_compiling()
    found, passes = times(candidate, runs, device, budget_s)
    if compiling and Pair(found["before"], found["after"]).speedup.median <= 1.0:
        _wait(candidate)
        found, passes = times(candidate, runs, device, budget_s)
    return Pair(found["before"], found["after"]), passes


def _wait(unit: Unit, patience_s: float = lookup.PATIENCE_S) -> None:
    """Wait for what its calls are looked up with, and differentiated by."""
    until = time.monotonic() + patience_s
    lookup.wait(patience_s)
    if unit.calls.grad:
        autograd_node.wait(max(0.0, until - time.monotonic()))


def times(
    candidate: Unit,
    runs: Mapping[str, Run],
    device: torch.device,
    budget_s: float,
    rounds: int = _ROUNDS,
    patience_s: float = lookup.PATIENCE_S,
) -> tuple[dict[str, Samples], int]:
    """Ways to compute one site, interleaved.

    Every kind of input it was seen with takes part as often as in one step of the model. What its
    calls are looked up with is waited for, at most ``patience_s``.

    Returns:
        the times of one pass, and how many such passes make a step.
    """
    kinds = candidate.calls.kinds
    passes = math.gcd(*(k.count for k in kinds))

    def arm(run: Run) -> Callable[[], None]:
        arms = [(_arm(candidate, k, run), k.count // passes) for k in kinds]

        def one_pass() -> None:
            for call, count in arms:
                for _ in range(count):
                    call()

        return one_pass

    if not isinstance(candidate, Candidate):
        _wait(candidate, min(patience_s, lookup.PATIENCE_S))
    found = interleave(
        {name: arm(run) for name, run in runs.items()},
        device=device,
        metric="wall",
        rounds=rounds,
        budget_s=min(budget_s, _MAX_S),
    )
    return found, passes


def _arm(candidate: Unit, kind: Kind, run: Run) -> Arm:
    """A callable that runs one site once: the output, and where it is differentiated dx and the
    gradients of the parameters."""
    x, dtype = kind.x.detach(), candidate.calls.autocast
    wanted: dict[str, Tensor] = {}
    if candidate.calls.grad:
        if kind.input_grad:
            x = wanted["dx"] = x.requires_grad_(True)
        wanted |= {t: p for t, p in candidate.parameters().items() if p.requires_grad}
    state: list[Tensor] = []
    apart = isinstance(candidate, Fusion) and candidate.forward is None  # parameters of one arm

    def call() -> dict[str, Tensor]:
        with torch.set_grad_enabled(bool(wanted)), _autocast(x, dtype):
            ys = run(x)
        if not wanted:
            return _named(ys)
        if not state:
            state.extend(_dy(y) for y in _several(ys))
        grads = zip(wanted, _gradients(ys, wanted, state, apart), strict=True)
        return {**_named(ys), **{name: grad for name, grad in grads if grad is not None}}

    return call


def _gradients(
    ys: Results, wanted: Mapping[str, Tensor], dys: Sequence[Tensor], apart: bool = False
) -> tuple[Tensor | None, ...]:
    """Of what is wanted; a result of frozen layers has none. ``apart``: some are not read."""
    pairs = zip(_several(ys), dys, strict=True)
    outputs, given = zip(*((y, dy) for y, dy in pairs if y.requires_grad), strict=True)
    return torch.autograd.grad(outputs, list(wanted.values()), given, allow_unused=apart)


def _several(ys: Results) -> tuple[Tensor, ...]:
    return ys if isinstance(ys, tuple) else (ys,)


def _named(ys: Results) -> dict[str, Tensor]:
    """Results by name."""
    if not isinstance(ys, tuple):
        return {"output": ys.detach()}
    return {f"output {i}": y.detach() for i, y in enumerate(ys)}


def _dy(y: Tensor) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(y.shape, generator=generator, device="cpu").to(y.device, y.dtype)


def _oracle(candidate: Unit, kind: Kind) -> dict[str, Tensor]:
    named = candidate.parameters()
    double = {title: p.detach().double() for title, p in named.items()}
    x = kind.x.detach().double()
    wanted: dict[str, Tensor] = {}
    if candidate.calls.grad:
        if kind.input_grad:
            wanted["dx"] = x.requires_grad_(True)
        wanted |= {t: double[t].requires_grad_(True) for t, p in named.items() if p.requires_grad}
    with torch.set_grad_enabled(bool(wanted)):
        assert candidate.exact is not None
        ys = candidate.exact(x, double)
    if not wanted:
        return _named(ys)
    # the same dy as the arms draw, rounded to the dtype they have
    narrow = candidate.calls.autocast or kind.x.dtype
    dys = [_dy(y.to(narrow)).double() for y in _several(ys)]
    grads = zip(wanted, _gradients(ys, wanted, dys), strict=True)
    return {**_named(ys), **{name: grad for name, grad in grads if grad is not None}}


def _autocast(x: Tensor, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if dtype is None else torch.autocast(x.device.type, dtype)
