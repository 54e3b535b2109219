"""Run a model without leaving a trace: everything a step may change is put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.core.interrupts import whole
from fastlinear.core.process_state import random_state, restore_random_state
from fastlinear.core.wrappers import inner_places
from fastlinear.profile.servable import is_freed, memory_of

_CONTAINERS = ("_parameters", "_buffers", "_modules")


@whole
def preserved(model: nn.Module, mode: str) -> Iterator[None]:
    """Put the model into ``mode`` and, on leaving, give back everything it was.

    Restored, also when the body raises: values of parameters and buffers (in place, same
    tensors), gradients, training flags, hooks, every attribute of every module (one level deep:
    an object a module holds is kept, not copied), and the random state of torch (CPU and all
    initialised CUDA devices), numpy and Python. Parameters are kept as a second copy in host
    memory; of a tensor subclass, those it holds.

    The training flags are set only where the model's own disagrees with the mode: a model in
    training whose BatchNorm layers are frozen stays that way in train mode.
    """
    modules = list(model.modules())
    attributes = [(m, dict(m.__dict__)) for m in modules]
    containers = [(c, c.copy()) for m in modules for c in _dicts(m)]
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    inside = [place for t in tensors for place in inner_places(t)]
    values = [_Saved(part) for t in tensors for part in memory_of(t) or ()]
    grads = [(p, p.grad) for p in model.parameters()]
    flags = [(p, p.requires_grad) for p in model.parameters()]
    rng = random_state()
    try:
        for p, _ in grads:
            p.grad = None
        if model.training != (mode == "train"):
            model.train(mode == "train")
        yield
    finally:
        for module, before in attributes:
            _put_back(module.__dict__, before)
        for container, before in containers:
            _put_back(container, before)
        for holder, name, inner in inside:
            if getattr(holder, name) is not inner:
                setattr(holder, name, inner)
        for saved in values:
            saved.put_back()
        for p, flag in flags:
            p.requires_grad_(flag)
        for p, grad in grads:
            p.grad = grad
        restore_random_state(rng)


def _dicts(module: nn.Module) -> Iterator[dict[Any, Any]]:
    """The module's own registries (parameters, buffers, children, hooks), not their contents."""
    for key, value in module.__dict__.items():
        if isinstance(value, dict) and (key in _CONTAINERS or "_hooks" in key):
            yield value


def _put_back(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    if len(now) == len(before) and all(now.get(k, now) is v for k, v in before.items()):
        return
    now.clear()
    now.update(before)


class _Saved:
    """A plain strided tensor and its values, copied to host memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version
        self._nbytes = tensor.untyped_storage().nbytes()
        self._copy = tensor.detach().to("cpu", copy=True)

    def put_back(self) -> None:
        """Make the tensor what it was. One that is still so is not written, which graphs that
        saved it rely on; writes through ``.data`` leave the version, so values are compared."""
        if is_freed(self._tensor):  # reading it would read foreign memory
            self._tensor.untyped_storage().resize_(self._nbytes)
        elif self._tensor._version == self._version and torch.equal(
            self._tensor.detach().cpu(), self._copy
        ):
            return
        with torch.no_grad():
            self._tensor.copy_(self._copy)
