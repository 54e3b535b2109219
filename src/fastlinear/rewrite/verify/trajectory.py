"""A few optimizer steps of a model, and a step length that moves its parameters noticeably."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fastlinear.core.wrappers import PLAIN
from fastlinear.rewrite.verify.inputs import Call
from fastlinear.rewrite.verify.running import Runner

_STEP = 1e-2  # one SGD step moves the parameters by this fraction of their norm


def trajectory(
    model: nn.Module, runner: Runner, call: Call, steps: int, rate: float
) -> dict[str, Tensor]:
    """The losses of some SGD steps and the parameters after them; the model is changed.

    Each step draws its own random numbers, the same for every model.
    """
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
    # Of a tensor subclass only its class knows the values; the losses depend on them.
    plain = ((n, p) for n, p in model.named_parameters() if type(p) in PLAIN)
    return found | {f"optimizer steps: {n}": p.detach() for n, p in plain}


def learning_rate(model: nn.Module, runner: Runner, call: Call) -> float:
    """The SGD rate at which the first step moves the parameters by a hundredth of their norm."""
    results = runner.results(model, call)
    size = grad = 0.0
    for name, parameter in model.named_parameters():
        found = results.get(f"grad.{name}")
        if found is not None:
            size += float(torch.linalg.vector_norm(parameter.detach().double())) ** 2
            grad += float(torch.linalg.vector_norm(found.double())) ** 2
    return _STEP * math.sqrt(size / grad) if grad > 0 and math.isfinite(grad) else 1e-3
