"""Running a model: seeds, gradients, and everything a run produces by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.core.errors import FastlinearError, InputError
from fastlinear.core.tensor_kinds import densely, is_odd
from fastlinear.core.wrappers import PLAIN
from fastlinear.profile.raised import PASSED_ON, raised
from fastlinear.profile.step import loss_of, private_copy
from fastlinear.rewrite.verify.inputs import Call
from fastlinear.rewrite.verify.kinks import Sides

LossFn = Callable[[Any], Tensor]
KEEP_BYTES = 1 << 28
"""Results of one run larger than this are computed again when they are needed again."""


@dataclass(frozen=True)
class Runner:
    """How a model is run in one mode.

    Attributes:
        mode: ``"inference"`` (forward under no_grad) or ``"train"`` (forward, loss, backward).
        loss_fn: output → scalar loss; None takes the profile's default loss.
        device: where the model lives.
        seed: seed set before every run, so that dropout draws the same mask for all contenders.
        function: who asks, in errors.
    """

    mode: str
    loss_fn: LossFn | None
    device: torch.device
    seed: int
    function: str = "optimize_"

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

    def told_step(self, model: nn.Module, call: Call, doing: str) -> None:
        """``step``, where what the model raises becomes an InputError that says ``doing``."""
        try:
            self.step(model, call)
        except PASSED_ON:
            raise
        except Exception as error:
            raise raised(self.function, model, doing, error) from error

    def results(self, model: nn.Module, call: Call) -> dict[str, Tensor]:
        """Everything one seeded run produces, by name: outputs, inputs that it writes to, and in
        train mode the loss, every parameter's gradient and every dense floating input's. Tensors
        are detached copies."""
        seed_all(self.seed, self.device)
        call = Call(*private_copy((call.args, call.kwargs)))  # some models write to their inputs
        if self.mode == "inference":
            before = _versions(call)
            with torch.no_grad():
                output = model(*call.args, **call.kwargs)
            return {**_outputs(output), **_written(before)}
        with torch.enable_grad():
            leaves = call.map(_with_grad)
            fresh = leaves.map(_writable)
            before = _versions(fresh)
            try:
                output = model(*fresh.args, **fresh.kwargs)
            except RuntimeError as error:
                if _OF_LEAVES not in str(error):
                    raise
                seed_all(self.seed, self.device)  # it sets its input's requires_grad itself
                before = _versions(leaves)
                output = model(*leaves.args, **leaves.kwargs)
            found = {**_outputs(output), **_written(before)}
            loss = self.loss(output)
        found["loss"] = loss.detach().clone()
        for parameter in model.parameters():
            parameter.grad = None
        if loss.requires_grad:
            loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                if type(parameter.grad) in PLAIN or is_odd(parameter.grad):
                    found[f"grad.{name}"] = densely(parameter.grad)
                parameter.grad = None
        for i, leaf in enumerate(leaves.leaves()):
            if isinstance(leaf, Tensor) and leaf.grad is not None:
                found[f"grad.input[{i}]"] = densely(leaf.grad)
        return found


def _outputs(output: Any) -> dict[str, Tensor]:
    return {f"output[{i}]": _plain(t) for i, t in enumerate(tensors_of(output))}


def _versions(call: Call) -> list[tuple[int, Tensor, int]]:
    """Each input tensor's number among the inputs, itself, and how often it was written to."""
    tensors = ((i, v) for i, v in enumerate(call.leaves()) if isinstance(v, Tensor))
    return [(i, t, t._version) for i, t in tensors if not t.is_inference()]


def _written(before: list[tuple[int, Tensor, int]]) -> dict[str, Tensor]:
    """The inputs written to since then."""
    return {f"input[{i}]": _plain(t) for i, t, version in before if t._version != version}


def _plain(t: Tensor) -> Tensor:
    """A detached copy with every number it holds at a place of its own."""
    t = t.detach()
    return densely(t) if is_odd(t) else t.clone()


def _with_grad(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point() and not is_odd(leaf):
        return leaf.detach().clone().requires_grad_(True)
    return leaf


def _writable(leaf: Any) -> Any:
    """A copy that a model may write to, unlike a leaf with a gradient."""
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


_OF_LEAVES = "requires_grad flags of leaf variables"
"""What torch says where that of a copy with a history is set."""


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
        with_loss = runner.mode == "train" and runner.loss_fn is not None
        said = " ".join(str(error).split())
        raise InputError(
            function,
            "inputs that the model runs on"
            + (", and a loss_fn that takes its output" if with_loss else ""),
            f"{type(error).__name__}: {said}",
            f"Call {'loss_fn(model(*inputs))' if with_loss else 'model(*inputs)'} yourself "
            "first; the model has not been changed.",
        ) from error
    if not ran.results:
        raise InputError(
            function,
            "an output with at least one tensor, to verify a rewrite by",
            "an output without any",
            "Optimize the part of the model that returns tensors.",
        )
    if runner.mode == "train" and not any(k.startswith("grad.") for k in ran.results):
        raise InputError(
            function,
            "a loss that reaches at least one parameter in train mode",
            "no gradient at all",
            'Use mode="inference", or pass a loss_fn that depends on the parameters.',
        )
    return ran.light()
