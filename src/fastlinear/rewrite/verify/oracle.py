"""What a rewritten model's results are judged against.

A float64 copy of the model. Where that does not fit into memory, cannot run, or would draw other
dropout masks, it is the model itself with every linear computed in float64, those too that a
forward writes on parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.core.function_mode import KnowingMode
from fastlinear.core.memory import free_bytes
from fastlinear.core.wrappers import PLAIN
from fastlinear.nn.stacked_experts import loop_over_experts
from fastlinear.profile.observe import multiplied
from fastlinear.profile.step import eager_modules
from fastlinear.rewrite.match.eligible import linear_kind, linear_modules, refuse_linear
from fastlinear.rewrite.swap.forwards import float64_linear
from fastlinear.rewrite.swap.modules import Swap, SwapSet
from fastlinear.rewrite.verify.inputs import Call
from fastlinear.rewrite.verify.kinks import following
from fastlinear.rewrite.verify.running import Ran, Runner, draws_random_numbers

Run = Callable[[nn.Module, Call], dict[str, Tensor]]


class Float64Products(KnowingMode):
    """While on, products with a parameter that a forward writes itself, ``F.linear`` and the like,
    are computed in float64 and rounded once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls ``func``."""
        kwargs = kwargs or {}
        found = multiplied(func, args, kwargs)
        if found is None or not found[0].is_floating_point() or type(found[1]) not in PLAIN:
            return func(*args, **kwargs)
        x, device = found[0], found[0].device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        with torch.autocast(device, enabled=False):
            exact = func(*map(double, args), **{n: double(v) for n, v in kwargs.items()})
        return exact.to(dtype)


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

    def run(self, model: nn.Module, call: Call, run: Run) -> dict[str, Tensor]:
        """What ``run`` gives for the oracle of ``model`` on one call."""
        if self.model is not None:
            return run(self.model, call.map(double))
        self.swaps.on()
        try:
            with Float64Products():
                return run(model, call)
        finally:
            self.swaps.off()

    def run_like(
        self,
        torchs: Ran,
        model: nn.Module,
        call: Call,
        run: Run,
        own: Ran | None = None,
    ) -> dict[str, Tensor]:
        """``run`` on the side of every kink that ``own`` took (by default ``torchs``, PyTorch's
        run in the model's dtype), where rounding decides it."""
        sides = torchs.sides if own is None else own.sides
        if torchs.sides:
            found = following(torchs.sides, sides, lambda: self.run(model, call, run))
            if found is not None:
                return found
        return self.run(model, call, run)


def make_oracle(
    model: nn.Module, runner: Runner, call: Call, ran: Ran
) -> tuple[Oracle, dict[str, Tensor] | None]:
    """The best oracle this model and this machine allow, and its results on ``call`` where they
    are known already; swaps must be off.

    ``ran`` is the model's own run on ``call``.
    """
    reason = _why_no_copy(model, runner, ran)
    if reason is None:
        try:
            exact = copy.deepcopy(model).double()
            loop_over_experts(exact)  # transformers' grouped_mm has no float64
            oracle = Oracle("float64 model", exact, SwapSet(()))
            first = oracle.run_like(ran, model, call, runner.results)
        except Exception as error:  # noqa: BLE001  whatever the model's code raises is the reason
            reason = f"the model does not run in float64 ({type(error).__name__})"
        else:
            return oracle, first if ran.whole else None
    swaps = [
        Swap(fqn, m, float64_linear(linear_kind(m) == "conv1d"))
        for fqn, m in linear_modules(model).items()
        if refuse_linear(model, fqn, m) is None
    ]
    return Oracle(f"float64 linears ({reason})", None, SwapSet(swaps)), None


def double(leaf: object) -> object:
    """A floating tensor in float64, anything else as it is."""
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.double()
    return leaf


def _why_no_copy(model: nn.Module, runner: Runner, ran: Ran) -> str | None:
    if draws_random_numbers(ran, runner):
        return "the model draws random numbers, which float64 would draw differently"
    if len(eager_modules(model)) < sum(1 for _ in model.modules()):
        return "a part of the model is compiled"
    tensors = (*model.parameters(), *model.buffers())
    odd = next((type(t).__name__ for t in tensors if type(t) not in PLAIN), None)
    if odd is not None:
        return f"what a {odd} is in float64, only its class knows"
    elements = sum(t.numel() for t in tensors)
    copies = 2 if runner.mode == "inference" else 5  # with gradients and optimizer copies
    needed, free = 8 * elements * copies, free_bytes(runner.device)
    if free is not None and needed > free // 2:
        return f"a float64 copy needs {needed >> 20} MiB of {free >> 20} MiB free"
    return None
