"""Small models for the rewriter's tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Clock = Callable[[dict[str, float]], None]
FindingTimes = Callable[[Sequence[float], Sequence[float]], None]


def mlp() -> nn.Sequential:
    """Linear, ReLU, Linear, GELU, Linear."""
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)
    )


class Functional(nn.Module):
    """Activations as functions, a method and a function attribute; one optional argument."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.fc3, self.fc4 = nn.Linear(16, 16), nn.Linear(16, 4)
        self.activation = F.silu
        self.scale = 2.0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = F.gelu(self.fc1(x), approximate="tanh")
        h = self.fc2(h).relu()
        if mask is not None:
            h = h * mask
        h = F.dropout(self.activation(self.fc3(h)), 0.5, self.training)
        return self.fc4(h) * self.scale


class SharedActivation(nn.Module):
    """One activation instance after two linears."""

    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 16), nn.Linear(16, 16)
        self.act = nn.ReLU()
        self.alone = alone

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.fc2(self.act(self.fc1(x))))
        return self.act(h - 1) if self.alone else h


class SharedLinear(nn.Module):
    """One linear called twice, once with and once without an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(16, 16), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.act(self.fc(x)))


class Residual(nn.Module):
    """The pre-activation is read twice, so the activation must not be fused."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(16, 16), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return self.act(h) + h


class Tied(nn.Module):
    """Two linears share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


class LoraLinear(nn.Module):
    """An adapter in the shape of PEFT's: owns base_layer, adds a low-rank term."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Raises(nn.Module):
    """Cannot run."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        raise LookupError("no such row")


def snapshot(model: nn.Module) -> list[tuple[Any, ...]]:
    """Everything a rewrite must put back: classes, attribute keys, state, gradients' presence."""
    rows: list[tuple[Any, ...]] = []
    for name, m in model.named_modules():
        hooks = [len(v) for k, v in vars(m).items() if k.endswith("hooks")]
        rows.append((name, type(m), tuple(vars(m)), m.training, tuple(hooks)))
    for name, t in model.state_dict().items():
        rows.append((name, t.data_ptr(), t.clone().numpy().tobytes()))
    rows += [(n, p.grad is None, p.requires_grad) for n, p in model.named_parameters()]
    return rows


def run(model: nn.Module, *args: Tensor) -> Tensor:
    """One forward without gradients."""
    with torch.no_grad():
        return model(*args)


def on_cuda(work: Any) -> Any:
    """The same work as if it ran on a GPU."""
    twin = copy.copy(work)
    twin.runner = replace(work.runner, device=torch.device("cuda"))
    return twin


def statuses(result: Any) -> dict[str, str]:
    return {s.fqn: s.status for s in result.sites}
