"""Weights of a tensor subclass that knows few ops, as libraries for quantization bring them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Int8(Tensor):
    """int8 values and one scale; it serves ``F.linear``, ``detach`` and ``clone``, and no other."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Int8:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values_, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Int8:
        return cls(inner["values_"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            weight = args[1].values_.to(args[1].scale.dtype) * args[1].scale
            return F.linear(args[0], weight, *args[2:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].values_, args[0].scale)
        if func is torch.ops.aten.clone.default:
            return cls(args[0].values_.clone(), args[0].scale.clone())
        raise NotImplementedError(f"Int8: {func}")


def quantized(model: nn.Module) -> nn.Module:
    """The model with every linear's weight as ``Int8``."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            scale = weight.abs().amax() / 127
            values = (weight / scale).round().to(torch.int8)
            module.weight = nn.Parameter(Int8(values, scale), requires_grad=False)
    return model


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.k(x) + self.v(x)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        towers = (nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(3))
        self.towers = nn.ModuleList(towers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([tower(x) for tower in self.towers]).sum(0)


class OnParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x, self.inner.weight, self.inner.bias))
