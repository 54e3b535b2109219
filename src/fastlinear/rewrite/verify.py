"""Is the rewritten model as accurate as the original? Both are judged against an oracle.

The oracle is a float64 copy of the model. Where that does not fit into memory, cannot run, or
would draw other dropout masks, it is the model itself with every linear computed in float64.
A result passes when ``err(rewritten) <= 2 * err(original) + tiny``, errors taken as the root mean
square over all input draws.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fastlinear.core.compare import DEFAULT_FACTOR, Verdict, judge, relative_error, unit_rounding
from fastlinear.ops.linear_act import reference
from fastlinear.rewrite.eligible import linear_kind, linear_modules, refuse_linear
from fastlinear.rewrite.forwards import float64_linear
from fastlinear.rewrite.measure import site_arm
from fastlinear.rewrite.rules.linear_act import Candidate
from fastlinear.rewrite.running import Call, Runner, draw, random_state
from fastlinear.rewrite.swap import Swap, SwapSet

_NOISE_FLOOR = 64.0  # a gradient below this many roundings of all gradients together is noise
_MORE_DRAWS = 3
_KEEP_BYTES = 1 << 28
_STEP = 1e-2  # one SGD step moves the parameters by this fraction of their norm


@dataclass(frozen=True)
class Oracle:
    """What the results are judged against.

    Attributes:
        name: ``"float64 model"`` or ``"float64 linears"``, with the reason for the latter.
        model: the float64 copy, or None.
        swaps: the float64 linears on the model itself, when there is no copy.
    """

    name: str
    model: nn.Module | None
    swaps: SwapSet

    def results(self, model: nn.Module, runner: Runner, call: Call) -> dict[str, Tensor]:
        """The oracle's results for one call."""
        if self.model is not None:
            return runner.results(self.model, call.map(_double))
        self.swaps.on()
        try:
            return runner.results(model, call)
        finally:
            self.swaps.off()


def make_oracle(model: nn.Module, runner: Runner, call: Call) -> Oracle:
    """The best oracle this model and this machine allow; swaps must be off."""
    reason = _why_no_copy(model, runner, call)
    if reason is None:
        try:
            double = copy.deepcopy(model).double()
            runner.results(double, call.map(_double))
        except Exception as error:  # noqa: BLE001
            reason = f"the model does not run in float64 ({type(error).__name__})"
        else:
            return Oracle("float64 model", double, SwapSet(()))
    swaps = [
        Swap(fqn, m, float64_linear(linear_kind(m) == "conv1d"))
        for fqn, m in linear_modules(model).items()
        if refuse_linear(model, fqn, m) is None
    ]
    return Oracle(f"float64 linears ({reason})", None, SwapSet(swaps))


def site_failure(candidate: Candidate) -> Verdict | None:
    """The first failed comparison of one site on its captured input, or None.

    Output and, in train mode, dx, dW and db, against the float64 reference.
    """
    ours = site_arm(candidate, candidate.after)()
    theirs = site_arm(candidate, candidate.before)()
    oracle = _site_oracle(candidate)
    for name, a, t, o in zip(("output", "dx", "dW", "db"), ours, theirs, oracle, strict=False):
        verdict = judge(f"{candidate.fqn}.{name}", a, t, o)
        if not verdict.passed:
            return verdict
    return None


def _site_oracle(candidate: Candidate) -> list[Tensor]:
    names = [n for n, p in candidate.module.named_parameters() if p.requires_grad]
    found = {n: p.detach().double() for n, p in candidate.module.named_parameters()}

    def run(x: Tensor) -> Tensor:
        w = found["weight"].t() if candidate.kind == "conv1d" else found["weight"]
        return reference.linear_act(x, w, found.get("bias"), candidate.activation)

    x = candidate.input().detach().double()
    if not candidate.problem.needs_grad:
        return [run(x)]
    wanted = [x.requires_grad_(True), *(found[n].requires_grad_(True) for n in names)]
    with torch.enable_grad():
        y = run(x)
    generator = torch.Generator().manual_seed(0)
    # the same dy as the site's arms draw, rounded to the dtype they have
    narrow = candidate.calls.autocast or candidate.input().dtype
    dy = torch.randn(y.shape, generator=generator).to(y.device, narrow).double()
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


class Judge:
    """Compares the model with and without swaps on several input draws.

    The original's and the oracle's results are computed once per draw and kept while small.
    """

    def __init__(
        self,
        model: nn.Module,
        runner: Runner,
        call: Call,
        *,
        draws: int,
        oracle: Oracle,
        seconds: float,
    ) -> None:
        self.model, self.runner, self.oracle = model, runner, oracle
        self.call, self.draws = call, draws
        self.seconds = seconds
        self.skipped: list[str] = []
        self._known: dict[int, _Known | None] = {}

    def verdicts(self, swaps: SwapSet) -> list[Verdict]:
        """One verdict for each result, pooled over the draws; failures get a second look on
        more draws before they count."""
        found: dict[str, list[Verdict]] = {}
        end = time.monotonic() + self.seconds
        for i in range(self.draws):
            if i > 0 and time.monotonic() > end:
                self.skipped.append(f"draws {i} to {self.draws - 1} (out of time)")
                break
            self._collect(i, swaps, found)
        failed = {n for n, v in found.items() if not _pool(n, v).passed}
        if failed and not any(math.isinf(_pool(n, found[n]).error) for n in failed):
            for i in range(self.draws, self.draws + _MORE_DRAWS):
                self._collect(i, swaps, found)
        return [_pool(name, each) for name, each in found.items()]

    def _collect(self, index: int, swaps: SwapSet, found: dict[str, list[Verdict]]) -> None:
        known = self._originals(index)
        if known is None:
            return
        theirs, oracle = known.theirs, known.oracle
        swaps.on()
        try:
            ours = self.runner.results(self.model, draw(self.call, index, self.runner.seed))
            state = random_state(self.runner.device)
        finally:
            swaps.off()
        same = all(torch.equal(a, b) for a, b in zip(state, known.state, strict=True))
        found.setdefault("randomness", []).append(
            Verdict("randomness", 0.0 if same else math.inf, 0.0, 0.0)
        )
        grads = [o for n, o in oracle.items() if n.startswith("grad.")]
        scale = math.hypot(*(float(torch.linalg.vector_norm(g.double())) for g in grads))
        for name, theirs_value in theirs.items():
            verdict = _compare(name, ours.get(name), theirs_value, oracle.get(name), scale)
            found.setdefault(name, []).append(verdict)

    def _originals(self, index: int) -> _Known | None:
        if index in self._known:
            return self._known[index]
        call = draw(self.call, index, self.runner.seed)
        try:
            theirs = self.runner.results(self.model, call)
            state = random_state(self.runner.device)
            known = _Known(theirs, self.oracle.results(self.model, self.runner, call), state)
        except Exception as error:
            if index == 0:
                raise
            # a random input may be one that the model does not accept
            self.skipped.append(f"draw {index} ({type(error).__name__}: {error})")
            self._known[index] = None
            return None
        if sum(t.nbytes for t in (*known.theirs.values(), *known.oracle.values())) < _KEEP_BYTES:
            self._known[index] = known
        return known


@dataclass(frozen=True)
class _Known:
    theirs: dict[str, Tensor]
    oracle: dict[str, Tensor]
    state: tuple[Tensor, ...]


def keep_passing(
    units: Sequence[str], passes: Callable[[Sequence[str]], bool], out_of_time: Callable[[], bool]
) -> list[str]:
    """A large subset of units that passes, found by halving. Empty when time runs out."""
    if not units or out_of_time():
        return []
    if passes(units):
        return list(units)
    if len(units) == 1:
        return []
    half = len(units) // 2
    first = keep_passing(units[:half], passes, out_of_time)
    second = keep_passing(units[half:], passes, out_of_time)
    if not first or not second:
        return first or second
    both = [*first, *second]
    return both if passes(both) else first


def trajectory_verdicts(
    model: nn.Module, swaps: SwapSet, runner: Runner, call: Call, oracle: Oracle, steps: int
) -> list[Verdict]:
    """A few SGD steps on copies: losses and parameters of original, rewritten and oracle."""
    rate = _learning_rate(model, runner, call)
    theirs = _trajectory(copy.deepcopy(model), runner, call, steps, rate)
    swaps.on()
    try:
        ours = _trajectory(copy.deepcopy(model), runner, call, steps, rate)
    finally:
        swaps.off()
    if oracle.model is not None:
        exact = _trajectory(copy.deepcopy(oracle.model), runner, call.map(_double), steps, rate)
    else:
        oracle.swaps.on()
        try:
            exact = _trajectory(copy.deepcopy(model), runner, call, steps, rate)
        finally:
            oracle.swaps.off()
    return [judge(n, ours[n], theirs[n], exact[n]) for n in theirs]


def _trajectory(
    model: nn.Module, runner: Runner, call: Call, steps: int, rate: float
) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    for i in range(steps):
        results = Runner(runner.mode, runner.loss_fn, runner.device, runner.seed + i).results(
            model, call
        )
        losses.append(results["loss"].reshape(()))
        for name, parameter in model.named_parameters():
            parameter.grad = results.get(f"grad.{name}")
        optimizer.step()
    found = {"optimizer steps: losses": torch.stack(losses)}
    found |= {f"optimizer steps: {n}": p.detach() for n, p in model.named_parameters()}
    return found


def _learning_rate(model: nn.Module, runner: Runner, call: Call) -> float:
    results = runner.results(model, call)
    size = grad = 0.0
    for name, parameter in model.named_parameters():
        found = results.get(f"grad.{name}")
        if found is not None:
            size += float(torch.linalg.vector_norm(parameter.detach().double())) ** 2
            grad += float(torch.linalg.vector_norm(found.double())) ** 2
    return _STEP * math.sqrt(size / grad) if grad > 0 and math.isfinite(grad) else 1e-3


def _compare(
    name: str, ours: Tensor | None, theirs: Tensor, oracle: Tensor | None, scale: float
) -> Verdict:
    if ours is None or oracle is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return Verdict(name, math.inf, 0.0, 0.0)
    if not theirs.is_floating_point():
        if theirs.is_complex() or theirs.numel() == 0:
            return Verdict(name, 0.0 if torch.equal(ours, theirs) else math.inf, 0.0, 0.0)
        wrong, usual = ((t != oracle).double().mean().item() for t in (ours, theirs))
        return Verdict(name, wrong, usual, DEFAULT_FACTOR * usual)
    exact = oracle.double()
    norm = float(torch.linalg.vector_norm(exact))
    rounding = unit_rounding(theirs.dtype)
    if name.startswith("grad.") and norm <= _NOISE_FLOOR * rounding * scale:
        # Zero but for rounding (a bias before a softmax, say): judged against all gradients.
        errors = [
            float(torch.linalg.vector_norm(t.double() - exact)) / scale if scale else 0.0
            for t in (ours, theirs)
        ]
        return Verdict(name, errors[0], errors[1], DEFAULT_FACTOR * errors[1] + 2 * rounding)
    error, usual = relative_error(ours, exact), relative_error(theirs, exact)
    if math.isinf(usual):
        return judge(name, ours, theirs, exact)
    return Verdict(name, error, usual, DEFAULT_FACTOR * usual + 2 * rounding)


def _pool(name: str, each: Sequence[Verdict]) -> Verdict:
    if len(each) == 1:
        return each[0]

    def mean(values: list[float]) -> float:
        return math.sqrt(sum(v * v for v in values) / len(values))

    return Verdict(
        name,
        mean([v.error for v in each]),
        mean([v.torch_error for v in each]),
        mean([v.limit for v in each]),
    )


def _why_no_copy(model: nn.Module, runner: Runner, call: Call) -> str | None:
    runner.results(model, call)
    before = random_state(runner.device)
    torch.default_generator.manual_seed(runner.seed)
    drawn = not torch.equal(before[0], torch.get_rng_state())
    if runner.device.type == "cuda":
        with torch.cuda.device(runner.device):
            torch.cuda.manual_seed(runner.seed)
        drawn = drawn or not torch.equal(before[1], torch.cuda.get_rng_state(runner.device))
    if drawn:
        return "the model draws random numbers, which float64 would draw differently"
    tensors = [*model.parameters(), *model.buffers()]
    elements = sum(t.numel() for t in tensors)
    copies = 2 if runner.mode == "inference" else 5  # with gradients and optimizer copies
    needed, free = 8 * elements * copies, _free_bytes(runner.device)
    if free is not None and needed > free // 2:
        return f"a float64 copy needs {needed >> 20} MiB of {free >> 20} MiB free"
    return None


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _double(leaf: object) -> object:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.double()
    return leaf
