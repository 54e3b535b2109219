"""Dropout on the CPU with PyTorch's random numbers, drawn in blocks.

PyTorch draws number after number, makes a float of each and divides it. The product with these goes
to new memory. Here one pass draws what to multiply by. The product may go over the linear's result,
which no backward of a linear reads. Every number is PyTorch's bit for bit, and so is the
generator's state after it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.calls import forward_mode, recorded, transforms_active
from fastlinear.core.errors import UnsupportedError
from fastlinear.core.fork_lock import ForkLock
from fastlinear.native import cpp_build
from fastlinear.rewrite.swap.forwards import (
    call_linear_act,
    is_hooked,
    is_plain,
    overridden,
    weight_and_bias,
)

SOURCE = Path(__file__).with_name("dropout.cpp")
_STATE_BYTES = 5056  # of the generator whose state dropout.cpp reads
_LEAST = 2048  # elements from which on it is faster than PyTorch's own
_FUNCTION, _FORWARD = F.dropout, nn.Dropout.forward
_lock = ForkLock()  # between reading the generator's state and writing it


def call_linear_dropout_of(
    path: Sequence[str], activation: str, rate: float, backend: str | None
) -> Callable[[nn.Module, Tensor], Tensor]:
    """What a rewritten parent calls for the linear at ``path``, its activation and a dropout."""

    def call_linear_dropout(parent: nn.Module, x: Tensor) -> Tensor:
        linear: Any = parent
        for name in path:
            linear = linear._modules[name]
        if is_plain(linear) and not overridden() and not is_hooked(linear.__dict__):
            return linear_dropout(x, *weight_and_bias(linear), activation, rate, backend)
        return F.dropout(activation_of(activation).value(linear(x)), rate, True)

    return call_linear_dropout


def linear_dropout(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    rate: float,
    backend: str | None,
) -> Tensor:
    """dropout(act(x Wᵀ + b)): (..., K) → (..., N), with the numbers PyTorch would draw now."""
    y = call_linear_act(x, weight, bias, activation, backend)
    return dropped(y, rate, over=activation == "none")


def dropped(y: Tensor, rate: float, over: bool) -> Tensor:
    """Dropout of y, which nobody else holds; ``over``: no backward reads y, it may be overwritten.

    What a kernel cannot serve or would hide from whoever watches, PyTorch does.
    """
    if torch.compiler.is_compiling() or not _served(y):
        return F.dropout(y, rate, True)
    noise = torch.empty_like(y)
    with _lock:
        generator = torch.default_generator
        state = generator.get_state()
        _draw(state, noise, 1.0 - rate)
        generator.set_state(state)
    free = over and not y._is_view() and not (y.is_leaf and y.requires_grad)
    return y.mul_(noise) if free else y * noise


def _served(y: Tensor) -> bool:
    return (
        not (transforms_active() or recorded() or forward_mode())
        and type(y) is Tensor
        and y.numel() >= _LEAST
        and y.dtype is torch.float32
        and y.is_cpu
        and y.is_contiguous()
        and F.dropout is _FUNCTION
        and nn.Dropout.forward is _FORWARD
        and _known() is None
    )


def _draw(state: Tensor, noise: Tensor, keep: float) -> None:
    """Fill ``noise`` with 0 and 1 / keep, and bring the state to what it is after that."""
    narrow = ctypes.c_float(keep).value  # PyTorch divides in float32
    _library().fastlinear_noise(
        *(state.data_ptr(), noise.data_ptr(), noise.numel(), keep, 1.0 / narrow)
    )


def reason_not() -> str | None:
    """Why dropout's kernels are not to be had here, or None."""
    return cpp_build.reason_not() or cpp_build.why_not_loaded(SOURCE) or _known()


@lru_cache(maxsize=1)
def _known() -> str | None:
    """Why the masks would not be PyTorch's, or None: tried once on a generator of its own."""
    ours, torchs = torch.Generator("cpu"), torch.Generator("cpu")
    for keep, count in ((0.9, 1), (0.5, 1000), (1.0 - 0.1, 4099), (0.25, 20000)):
        torchs.manual_seed(count)
        torch.empty(count, device="cpu").uniform_(generator=torchs)  # single words: odd places
        state = torchs.get_state()
        if state.numel() != _STATE_BYTES:
            return "this build of torch has another random generator"
        expected = torch.empty(count, dtype=torch.float32, device="cpu")
        expected.bernoulli_(keep, generator=torchs).div_(keep)
        noise = torch.empty_like(expected)
        try:
            _draw(state, noise, keep)
        except UnsupportedError as error:
            return str(error)
        ours.set_state(state)
        states = ours.get_state(), torchs.get_state()
        if not (torch.equal(noise, expected) and torch.equal(*states)):
            return "this build of torch draws its masks in another way"
    return None


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = cpp_build.load(SOURCE)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.fastlinear_noise.argtypes = [pointer, pointer, size, ctypes.c_double, ctypes.c_float]
    return library
