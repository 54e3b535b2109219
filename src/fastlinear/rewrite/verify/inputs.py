"""The inputs of a model: one call, other draws of it, and its description as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fastlinear.core.errors import PlanError

# Deviations of this share of the mean are what rounding the mean to float32 leaves.
_NO_DEVIATION = 1e-6
_MOST_NUMBERS = 1 << 30  # of inputs that a plan describes


@dataclass(frozen=True)
class Call:
    """One call of the model: positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def leaves(self) -> list[Any]:
        """Every leaf of the arguments, in a stable order."""
        return pytree.tree_leaves((self.args, self.kwargs))

    def map(self, function: Callable[[Any], Any]) -> Call:
        """The same structure with every leaf replaced by ``function(leaf)``."""
        args, kwargs = pytree.tree_map(function, (self.args, self.kwargs))
        return Call(args, kwargs)


def draw(call: Call, index: int, seed: int) -> Call:
    """Input draw ``index``: 0 is the given call; others keep shapes, dtypes and value ranges.

    Floating tensors are redrawn normal with the mean and deviation of their finite values, integer
    tensors are permuted (so values stay valid), booleans, sparse tensors and everything else are
    kept. Where there is no deviation to take (all values equal, or none finite), it is 1: a tensor
    of zeros or NaN shows no difference between two models.
    """
    if index == 0:
        return call
    generator = torch.Generator("cpu").manual_seed(seed * 1009 + index)

    def redraw(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.numel() == 0 or leaf.dtype is torch.bool:
            return leaf
        if leaf.layout is not torch.strided:
            return leaf
        if leaf.is_floating_point():
            value = leaf.detach().float()
            finite = value[torch.isfinite(value)]
            mean, std = 0.0, 0.0
            if finite.numel() > 0:
                mean, std = float(finite.mean()), float(finite.std(correction=0))
            return _normal(leaf.shape, mean, std, generator).to(leaf.device, leaf.dtype)
        if leaf.is_complex():
            return leaf
        order = torch.randperm(leaf.numel(), generator=generator, device="cpu").to(leaf.device)
        return leaf.reshape(-1)[order].reshape(leaf.shape)

    return call.map(redraw)


def _normal(shape: Sequence[int], mean: float, std: float, generator: torch.Generator) -> Tensor:
    """Normal numbers in float32; a tensor (not a single number) of no deviation gets 1."""
    fresh = torch.randn(shape, generator=generator, device="cpu")
    if fresh.numel() > 1 and not std > _NO_DEVIATION * abs(mean):
        std = 1.0
    return fresh * std + mean


def input_specs(call: Call) -> dict[str, Any]:
    """Shapes, dtypes and value ranges of the inputs, as JSON; ``from_specs`` rebuilds a call."""

    def spec(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            return {"unknown": f"{type(leaf).__qualname__} of layout {leaf.layout}"}
        if isinstance(leaf, Tensor):
            item: dict[str, Any] = {
                "tensor": str(leaf.dtype).removeprefix("torch."),
                "shape": list(leaf.shape),
            }
            if leaf.numel() and leaf.is_floating_point():
                value = leaf.detach().float()
                value = value[torch.isfinite(value)]
                if value.numel():
                    item |= {"mean": float(value.mean()), "std": float(value.std(correction=0))}
            elif leaf.numel() and not leaf.is_complex():
                item |= {"min": int(leaf.min()), "max": int(leaf.max())}
            return item
        if leaf is None or isinstance(leaf, bool | int | float | str):
            return {"value": leaf}
        return {"unknown": type(leaf).__qualname__}

    return {
        "args": [_spec_tree(a, spec) for a in call.args],
        "kwargs": {k: _spec_tree(v, spec) for k, v in call.kwargs.items()},
    }


def _spec_tree(item: Any, spec: Callable[[Any], Any]) -> Any:
    if isinstance(item, list | tuple):
        kind = "tuple" if isinstance(item, tuple) else "list"
        return {kind: [_spec_tree(i, spec) for i in item]}
    if isinstance(item, dict):
        return {"dict": {str(k): _spec_tree(v, spec) for k, v in item.items()}}
    return spec(item)


def from_specs(specs: dict[str, Any], device: torch.device, seed: int) -> Call:
    """A call with random tensors of the stored shapes, dtypes and value ranges.

    Raises PlanError when the description is damaged, or an input was of a kind that a plan cannot
    describe.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    left = _MOST_NUMBERS

    def build(item: dict[str, Any]) -> Any:
        if "tuple" in item:
            return tuple(build(i) for i in item["tuple"])
        if "list" in item:
            return [build(i) for i in item["list"]]
        if "dict" in item:
            return {k: build(v) for k, v in item["dict"].items()}
        if "value" in item:
            return item["value"]
        if "tensor" not in item:
            raise PlanError(
                "apply_",
                "a plan whose inputs are tensors, numbers, strings or containers of them",
                f"an input of type {item.get('unknown')}",
                "Pass inputs=... to apply_.",
            )
        dtype, shape = getattr(torch, item["tensor"]), tuple(item["shape"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{item['tensor']} is no dtype")
        nonlocal left
        left -= math.prod(map(abs, shape))
        if left < 0:
            raise PlanError(
                "apply_",
                f"a plan whose inputs have at most {_MOST_NUMBERS} numbers",
                f"{item['tensor']} of shape {list(shape)}",
                "Pass inputs=... to apply_.",
            )
        if dtype.is_floating_point:
            mean, std = item.get("mean", 0.0), item.get("std", 0.0)
            if not (math.isfinite(mean) and 0.0 <= std < math.inf):
                raise ValueError(f"mean {mean} and std {std}")
            return _normal(shape, mean, std, generator).to(device, dtype)
        if dtype is torch.bool:
            if item.get("min") == item.get("max"):
                return torch.full(shape, bool(item.get("max", 1)), device=device)
            return (torch.rand(shape, generator=generator, device="cpu") < 0.5).to(device)
        low, high = item.get("min", 0), item.get("max", 0)
        return torch.randint(low, high + 1, shape, generator=generator, device="cpu").to(
            device, dtype
        )

    try:
        args = tuple(build(a) for a in specs["args"])
        return Call(args, {k: build(v) for k, v in specs["kwargs"].items()})
    except PlanError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as e:
        raise PlanError(
            "apply_",
            "a complete description of the inputs in the plan",
            f"{type(e).__name__}: {e}",
            "Pass inputs=... to apply_, or make the plan again with optimize_.",
        ) from e
