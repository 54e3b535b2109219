"""Running a model: seeds, flattened results, input draws, and inputs described as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fastlinear.core.errors import FastlinearError, InputError
from fastlinear.profile.step import loss_of, private_copy
from fastlinear.rewrite.kinks import Sides

LossFn = Callable[[Any], Tensor]
KEEP_BYTES = 1 << 28
"""Results of one run larger than this are computed again when they are needed again."""


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


@dataclass(frozen=True)
class Runner:
    """How a model is run in one mode.

    Attributes:
        mode: ``"inference"`` (forward under no_grad) or ``"train"`` (forward, loss, backward).
        loss_fn: output → scalar loss; None takes the profile's default loss.
        device: where the model lives.
        seed: seed set before every run, so that dropout draws the same mask for all contenders.
    """

    mode: str
    loss_fn: LossFn | None
    device: torch.device
    seed: int

    def loss(self, output: Any) -> Tensor:
        """The scalar loss of one output."""
        return loss_of(output) if self.loss_fn is None else self.loss_fn(output)

    def step(self, model: nn.Module, call: Call) -> None:
        """One unit of work as measured: forward, and in train mode loss and backward."""
        if self.mode == "inference":
            with torch.no_grad():
                model(*call.args, **call.kwargs)
            return
        with torch.enable_grad():
            loss = self.loss(model(*call.args, **call.kwargs))
        for parameter in model.parameters():
            parameter.grad = None
        loss.backward()

    def results(self, model: nn.Module, call: Call) -> dict[str, Tensor]:
        """Everything one seeded run produces, by name: outputs, and in train mode the loss, every
        parameter's gradient and every floating input's gradient. Tensors are detached copies."""
        seed_all(self.seed, self.device)
        call = Call(*private_copy((call.args, call.kwargs)))  # some models write to their inputs
        if self.mode == "inference":
            with torch.no_grad():
                output = model(*call.args, **call.kwargs)
            return {f"output[{i}]": t.clone() for i, t in enumerate(tensors_of(output))}
        with torch.enable_grad():
            leaves = call.map(_with_grad)
            fresh = leaves.map(_writable)
            output = model(*fresh.args, **fresh.kwargs)
            found = {f"output[{i}]": t.detach().clone() for i, t in enumerate(tensors_of(output))}
            loss = self.loss(output)
        found["loss"] = loss.detach().clone()
        for parameter in model.parameters():
            parameter.grad = None
        if loss.requires_grad:
            loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"grad.{name}"] = parameter.grad
                parameter.grad = None
        for i, leaf in enumerate(leaves.leaves()):
            if isinstance(leaf, Tensor) and leaf.grad is not None:
                found[f"grad.input[{i}]"] = leaf.grad
        return found


def _with_grad(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.detach().clone().requires_grad_(True)
    return leaf


def _writable(leaf: Any) -> Any:
    """A copy that a model may write to, unlike a leaf with a gradient."""
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def seed_all(seed: int, device: torch.device) -> None:
    """Seed the CPU's generator and, for a CUDA model, that device's."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """The states of the generators ``seed_all`` seeds."""
    if device.type == "cuda":
        return torch.get_rng_state(), torch.cuda.get_rng_state(device)
    return (torch.get_rng_state(),)


def tensors_of(output: Any) -> list[Tensor]:
    """Every tensor of an output: tensors, sequences, mappings, dataclasses and the attributes of
    other objects, nested, in order."""
    return _tensors_of(output, [])


def _tensors_of(output: Any, inside: list[Any]) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output.detach()]
    if any(output is o for o in inside):  # it holds itself
        return []
    if isinstance(output, Mapping):
        items: list[Any] = list(output.values())
    elif isinstance(output, list | tuple):
        items = list(output)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        items = [getattr(output, f.name) for f in dataclasses.fields(output)]
    elif hasattr(output, "__dict__") and not isinstance(output, type | ModuleType | nn.Module):
        items = [] if callable(output) else list(vars(output).values())
    else:
        return []
    return [t for item in items for t in _tensors_of(item, [*inside, output])]


@dataclass(frozen=True)
class Ran:
    """The results of one call, the random state it left, and in train mode the outputs of its
    kinked activations.

    Attributes:
        whole: False where the outputs were too large to be kept.
    """

    results: dict[str, Tensor]
    state: tuple[Tensor, ...]
    sides: tuple[Tensor, ...] = ()
    whole: bool = True

    def light(self) -> Ran:
        """The same without outputs of activations that would fill the memory meanwhile."""
        if sum(t.nbytes for t in self.sides) < KEEP_BYTES:
            return self
        return dataclasses.replace(self, sides=(), whole=False)


def run_once(model: nn.Module, call: Call, runner: Runner) -> Ran:
    """One seeded run."""
    if runner.mode == "inference":
        return Ran(runner.results(model, call), random_state(runner.device))
    with Sides() as sides:
        results = runner.results(model, call)
    return Ran(results, random_state(runner.device), tuple(sides.outputs))


def draws_random_numbers(ran: Ran, runner: Runner) -> bool:
    """Whether that run drew random numbers. Seeds the generators."""
    seed_all(runner.seed, runner.device)
    unused = random_state(runner.device)
    return not all(torch.equal(a, b) for a, b in zip(ran.state, unused, strict=True))


def check_runs(function: str, model: nn.Module, call: Call, runner: Runner) -> Ran:
    """The model's own results on the inputs. Raises InputError, with the model's exception as
    its cause, if it raises; and if train mode finds nothing to differentiate."""
    try:
        ran = run_once(model, call, runner)
    except FastlinearError:
        raise
    except Exception as error:
        raise InputError(
            function,
            expected="inputs that the model runs on",
            received=f"{type(error).__name__}: {error}",
            remedy="Call model(*inputs) yourself first; the model has not been changed.",
        ) from error
    if not ran.results:
        raise InputError(
            function,
            expected="an output with at least one tensor, to verify a rewrite by",
            received="an output without any",
            remedy="Optimize the part of the model that returns tensors.",
        )
    if runner.mode == "train" and not any(k.startswith("grad.") for k in ran.results):
        raise InputError(
            function,
            expected="a loss that reaches at least one parameter in train mode",
            received="no gradient at all",
            remedy='Use mode="inference", or pass a loss_fn that depends on the parameters.',
        )
    return ran.light()


def draw(call: Call, index: int, seed: int) -> Call:
    """Input draw ``index``: 0 is the given call; others keep shapes, dtypes and value ranges.

    Floating tensors are redrawn normal with the same mean and deviation, integer tensors are
    permuted (so values stay valid), booleans, sparse tensors and everything else are kept.
    """
    if index == 0:
        return call
    generator = torch.Generator().manual_seed(seed * 1009 + index)

    def redraw(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.numel() == 0 or leaf.dtype is torch.bool:
            return leaf
        if leaf.layout is not torch.strided:
            return leaf
        if leaf.is_floating_point():
            value = leaf.detach().float()
            finite = value[torch.isfinite(value)]
            if finite.numel() == 0:
                return leaf
            std = float(finite.std(correction=0))
            fresh = torch.randn(leaf.shape, generator=generator) * std + float(finite.mean())
            return fresh.to(leaf.device, leaf.dtype)
        if leaf.is_complex():
            return leaf
        order = torch.randperm(leaf.numel(), generator=generator).to(leaf.device)
        return leaf.reshape(-1)[order].reshape(leaf.shape)

    return call.map(redraw)


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

    Raises InputError when an input was of a kind that a plan cannot describe.
    """
    generator = torch.Generator().manual_seed(seed)

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
            raise InputError(
                "apply_",
                expected="a plan whose inputs are tensors, numbers, strings or containers of them",
                received=f"an input of type {item.get('unknown')}",
                remedy="Pass inputs=... to apply_.",
            )
        dtype, shape = getattr(torch, item["tensor"]), tuple(item["shape"])
        if dtype.is_floating_point:
            values = torch.randn(shape, generator=generator) * item.get("std", 1.0)
            return (values + item.get("mean", 0.0)).to(device, dtype)
        if dtype is torch.bool:
            if item.get("min") == item.get("max"):
                return torch.full(shape, bool(item.get("max", 1)), device=device)
            return (torch.rand(shape, generator=generator) < 0.5).to(device)
        low, high = item.get("min", 0), item.get("max", 0)
        return torch.randint(low, high + 1, shape, generator=generator).to(device, dtype)

    return Call(
        tuple(build(a) for a in specs["args"]), {k: build(v) for k, v in specs["kwargs"].items()}
    )
