"""One step of a model: its inputs, its loss, its device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.profile.raised import PASSED_ON, raised
from fastlinear.profile.servable import check_servable, check_tensors

LossFn = Callable[[Any], Tensor]
FUNCTION = "fastlinear.profile"
"""Who asks, in errors, where nobody says otherwise."""


def loss_of(output: Any) -> Tensor:
    """The default scalar loss of a training step.

    ``output.loss`` (or ``output["loss"]``) where the model returns a scalar one; otherwise the
    sum over all floating-point tensors in the output of the mean of their squares, in float32 or
    wider.

    Args:
        output: a tensor, or tensors nested in tuples, lists, mappings and dataclasses.

    Raises:
        InputError: nothing in the output has a gradient.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss.reshape(())
    terms = [_mean_square(t) for t in _tensors(output) if t.requires_grad]
    if not terms:
        raise InputError(
            FUNCTION,
            "an output with at least one floating-point tensor that has a gradient",
            f"{type(output).__name__} without one",
            "Pass loss_fn=, or use mode='inference'.",
        )
    total = terms[0]
    for term in terms[1:]:
        total = total + term.to(total.device)
    return total


def _mean_square(t: Tensor) -> Tensor:
    wide = t if t.dtype in (torch.float32, torch.float64) else t.float()
    return wide.square().mean()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Floating-point tensors nested in ``value``, in order, none twice."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        v = stack.pop()
        if isinstance(v, Tensor):
            if v.is_floating_point() and id(v) not in seen:
                seen.add(id(v))
                yield v
        elif isinstance(v, Mapping):
            stack.extend(reversed(list(v.values())))
        elif isinstance(v, list | tuple):
            stack.extend(reversed(v))
        elif dataclasses.is_dataclass(v) and not isinstance(v, type):
            stack.extend(reversed([getattr(v, f.name) for f in dataclasses.fields(v)]))


def private_copy(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """The inputs with every tensor copied (same strides, own gradient), so that a step that
    writes to its inputs or to their gradients leaves the caller's alone."""
    return pytree.tree_map(lambda v: _copy(v) if isinstance(v, Tensor) else v, inputs)


def _copy(t: Tensor) -> Tensor:
    plain = type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided
    if not plain or t.device.type == "meta":
        return t.detach().requires_grad_(t.requires_grad)
    storage = t.untyped_storage()
    if storage.nbytes() > 4 * t.nbytes + 4096:  # a small view of something large
        return t.detach().clone().requires_grad_(t.requires_grad)
    copy = torch.empty(0, dtype=t.dtype, device=t.device)
    copy.set_(storage.clone(), t.storage_offset(), t.shape, t.stride())
    return copy.requires_grad_(t.requires_grad)


def device_of(model: nn.Module, inputs: Any, function: str = FUNCTION) -> torch.device:
    """Where the model runs: its first CUDA parameter or buffer, else its first one, else the
    first input tensor. Raises for inputs without values and devices nothing here can measure."""
    given = [v for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor)]
    check_tensors(((f"input {i}", t) for i, t in enumerate(given)), function)
    tensors = [*model.parameters(), *model.buffers(), *given]
    devices = [t.device for t in tensors]
    device = next((d for d in devices if d.type == "cuda"), None)
    device = device or (devices[0] if devices else torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            function,
            "a CPU or CUDA model",
            f"device {device}",
            "Move it first, for example model.to('cpu').",
        )
    return device


def check_model(model: Any, function: str = FUNCTION) -> None:
    """Raise unless ``model`` is an eager module whose parts can be told apart."""
    if not isinstance(model, nn.Module):
        raise InputError(
            function,
            "model to be an nn.Module",
            _kind(model),
            "Pass the module itself, not its name, class or weights.",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError(
            function,
            "an eager nn.Module",
            f"a scripted module ({_kind(model)})",
            "Profile the module it was scripted from.",
        )
    if is_compiled(model):
        raise UnsupportedError(
            function,
            "an eager module, whose kernels can be told apart",
            "a model under torch.compile",
            "Profile the uncompiled module (model._orig_mod) and compile afterwards.",
        )
    for name, module in model.named_modules():
        where = f"{name!r}" if name else "the model itself"
        if any(nn.parameter.is_lazy(p) for p in module._parameters.values()):
            raise InputError(
                function,
                "initialised parameters",
                f"{where} is a lazy module that has not run yet",
                "Call the model once on real inputs first.",
            )
    check_servable(model, function)
    tensors = (*model.named_parameters(), *model.named_buffers())
    frozen = next((name for name, tensor in tensors if tensor.is_inference()), None)
    if frozen is not None:
        raise InputError(
            function,
            "parameters and buffers that tell when they are written to",
            f"{frozen!r}, made under torch.inference_mode()",
            "Make or load the model outside of it; it may still run inside.",
        )


def is_compiled(module: nn.Module) -> bool:
    """Whether calling this module runs compiled code: torch.compile(module), module.compile()."""
    wrapped = type(module).__name__ == "OptimizedModule"
    return wrapped or module.__dict__.get("_compiled_call_impl") is not None


def eager_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that run in Python, one by one: scripted and compiled parts are left out with all
    they hold."""
    opaque = [m for m in model.modules() if isinstance(m, torch.jit.ScriptModule) or is_compiled(m)]
    inside = {id(m) for part in opaque for m in part.modules()}
    return [m for m in model.modules() if id(m) not in inside]


def watched_modules(model: nn.Module) -> list[nn.Module]:
    """Those of ``eager_modules`` that are called: not the layers of an ``fl.nn.MLP``, which runs as
    a whole and refuses hooks on them (``never_called``)."""
    return [m for m in eager_modules(model) if not getattr(m, "never_called", False)]


def _kind(value: Any) -> str:
    return type(value).__name__


class Step:
    """One step: forward under ``no_grad`` (inference), or forward, loss and backward (train).

    ``forward`` alone and ``__call__`` (the whole step) take no arguments. In train mode the
    gradients of the step before are dropped first, so that memory does not grow. What the model,
    ``loss_fn`` or the backward raises becomes an InputError that says what the run was for:
    ``doing``, None for the first.
    """

    def __init__(self, model: nn.Module, inputs: Any, mode: str, loss_fn: LossFn | None) -> None:
        self.model = model
        self.args, self.kwargs = inputs
        self.train = mode == "train"
        self.loss_fn = loss_fn or loss_of
        self.doing: str | None = None
        self.leaves: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.leaves += [
            v for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor) and v.requires_grad
        ]

    def forward(self) -> Any:
        """The model's output, with or without gradients as the mode says."""
        try:
            with torch.set_grad_enabled(self.train):
                return self.model(*self.args, **self.kwargs)
        except PASSED_ON:
            raise
        except Exception as error:
            wanted = f"inputs that {_kind(self.model)}.forward accepts"
            raise self._raised(error, wanted, "inputs on which it raises") from error

    def drop_grads(self) -> None:
        """Forget all gradients of the model and of the private inputs."""
        for leaf in self.leaves:
            leaf.grad = None

    def loss(self, output: Any) -> Tensor:
        """The scalar loss. Raises InputError when ``loss_fn`` returns anything else."""
        try:
            with torch.enable_grad():
                loss = self.loss_fn(output)
        except PASSED_ON:
            raise
        except Exception as error:
            wanted = f"a loss_fn that takes the output of {_kind(self.model)}"
            raise self._raised(error, wanted, "one that raises") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise InputError(
                FUNCTION,
                "loss_fn to return one differentiable number",
                f"{_kind(loss)}"
                + (f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""),
                "Reduce it, for example with .mean(), and do not detach it.",
            )
        return loss

    def backward(self, loss: Tensor) -> None:
        """The gradients of the loss."""
        try:
            loss.backward()
        except PASSED_ON:
            raise
        except Exception as error:
            wanted = f"a loss of {_kind(self.model)} that can be differentiated"
            raise self._raised(error, wanted, "one whose backward raises") from error

    def __call__(self) -> None:
        if not self.train:
            self.forward()
            return
        self.drop_grads()
        self.backward(self.loss(self.forward()))

    def _raised(self, error: Exception, wanted: str, received: str) -> InputError:
        if self.doing is not None:
            return raised(FUNCTION, self.model, self.doing, error)
        first = (str(error).strip().splitlines() or [""])[0]
        return InputError(
            FUNCTION,
            wanted,
            f"{received} {type(error).__name__}: {first}",
            "Call the model on them directly to see the whole traceback.",
        )
