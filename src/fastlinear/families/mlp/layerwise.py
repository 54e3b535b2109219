"""Layer after layer, each by the backend linear_act would take, chosen once and frozen.

On a path without gradients on the CPU, hidden activations go to buffers planned ahead: two a
thread, as large as the widest layers. They are never returned. On a GPU torch's caching allocator
does as well, and a buffer of our own would have to outlive any CUDA graph it was recorded in.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.calls import is_captured
from fastlinear.core.precision import matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import is_installed
from fastlinear.dispatch.select import Choice, select
from fastlinear.families.linear import problem as linear_act
from fastlinear.families.linear.autograd import backward_of
from fastlinear.families.linear.selection import select_backward, whole_is_measured
from fastlinear.families.mlp.problem import (
    activations_of,
    layer_activations,
    linear_x_layout,
    widths_of,
)
from fastlinear.families.mlp.reference import (
    Biases,
    Needs,
    Weights,
    first_needed,
    kept_input,
    layer_input,
)
from fastlinear.fastpath import recorder

_MAX_PLANS = 1024
_MAX_BUFFER_BYTES = 1 << 28  # a thread keeps no more than this
_plans: dict[Any, Any] = {}
cache.on_change(_plans.clear)
_held = threading.local()


def reason_not(p: Problem) -> str | None:
    """Why this backend cannot serve the Problem, or None."""
    if p.dtype == "float64":
        return "float64 goes to PyTorch's own path"
    if p.dim("M") < 1 or min(widths_of(p)) < 1:
        return "an empty dimension"
    if p.device == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def forward(
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    final_activation: str,
    save: bool,
    hidden: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(y, saved): x (M, n_0) → y (M, n_L); saved as in ``reference.forward``."""
    key = (
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        tuple([(w.shape, w.stride()) for w in weights]),
        tuple([b is None for b in biases]),
        activation,
        final_activation,
        save,
        matmul_precision(x.dtype),
        is_captured(x),
    )
    runs = _plans.get(key)
    if runs is None:
        names = layer_activations(len(weights), activation, final_activation)
        runs = _remember(key, _frozen(x, weights, biases, names, save))
    if save:
        return _saving(x, weights, biases, runs, hidden)
    h = x
    if x.device.type != "cpu" or recorder.active() is not None:  # whose buffers are its own
        for weight, bias, (run, name, _) in zip(weights, biases, runs, strict=True):
            h = run(h, weight, bias, name, False)[0]
        return h, ()
    spaces = _buffers(x, weights)
    for i, (weight, bias, (run, name, in_place)) in enumerate(
        zip(weights, biases, runs, strict=True)
    ):
        if in_place is None:
            h = run(h, weight, bias, name, False)[0]
            continue
        if i == len(weights) - 1:
            h = F.linear(h, weight, bias)
        else:
            out = spaces[i % 2][: h.shape[0] * weight.shape[0]].view(h.shape[0], weight.shape[0])
            wt = weight.t()
            h = torch.mm(h, wt, out=out) if bias is None else torch.addmm(bias, h, wt, out=out)
        in_place(h)
    return h, ()


def backward(
    dy: Tensor,
    x: Tensor,
    weights: Weights,
    saved: tuple[Tensor, ...],
    activation: str,
    final_activation: str,
    needs: Needs,
) -> tuple[Tensor | None, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """(dx, dWs, dbs), each None where not needed; dy (M, n_L)."""
    need_x, need_ws, need_bs = needs
    names = layer_activations(len(weights), activation, final_activation)
    shapes = tuple([(w.shape, w.stride()) for w in weights])
    regime = matmul_precision(x.dtype), is_captured(x)
    key = (x.shape, x.stride(), x.dtype, x.device, shapes, names, *regime)
    runs = _plans.get(key)
    if runs is None:
        runs = _remember(key, _frozen_backward(x, weights, names))
    dws: list[Tensor | None] = [None] * len(weights)
    dbs: list[Tensor | None] = [None] * len(weights)
    first = first_needed(needs)
    dh: Tensor | None = dy
    for i in reversed(range(first, len(weights))):
        assert dh is not None
        read = None if activation_of(names[i]).saved == "none" else saved[i]
        entering = _input(i, x, saved, names) if need_ws[i] else None
        wanted = i > first or need_x, need_ws[i], need_bs[i]
        dh, dws[i], dbs[i] = runs[i](dh, read, entering, weights[i], names[i], wanted)
    return (dh if need_x else None), tuple(dws), tuple(dbs)


def _input(i: int, x: Tensor, saved: tuple[Tensor, ...], names: tuple[str, ...]) -> Tensor:
    """``layer_input``, by a kernel of our own where it computes something."""
    before = saved[i - 1]
    if not i or not before.is_cuda or not before.is_contiguous():
        return layer_input(i, x, saved, names)
    if (given := kept_input(i, saved, len(names))) is not None:
        return given
    if not activates_at(names[i - 1], before.dtype):
        return layer_input(i, x, saved, names)
    from fastlinear.kernels.triton.elementwise import activated

    return activated(before, names[i - 1])


def activates_at(name: str, dtype: torch.dtype) -> bool:
    """Whether a backward on a GPU has a launch for results of such a layer, which are not kept."""
    kept = activation_of(name).saved == "pre"
    return kept and dtype != torch.float64 and is_installed("triton")


def _saving(
    x: Tensor, weights: Weights, biases: Biases, runs: Any, hidden: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    saved, outputs = [], []
    h = x
    for weight, bias, (run, name, _) in zip(weights, biases, runs, strict=True):
        kept = activation_of(name).saved == "pre"
        h, pre = run(h, weight, bias, name, kept)
        saved.append(pre if kept else h)
        outputs.append(h)
    return h, (*saved, *(outputs[:-1] if hidden else ()))


def _frozen(
    x: Tensor, weights: Weights, biases: Biases, names: tuple[str, ...], save: bool
) -> tuple[Any, ...]:
    """(run, activation, its in-place form where eager is chosen) for each layer."""
    chosen = []
    for i, (weight, bias, name) in enumerate(zip(weights, biases, names, strict=True)):
        choice = select(problem_of(i, x, weight, bias is not None, name, save))
        plain = choice.backend.name == "eager" and x.device.type == "cpu" and not save
        chosen.append((choice.load(), name, activation_of(name).in_place if plain else None))
    return tuple(chosen)


def _frozen_backward(x: Tensor, weights: Weights, names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(
        backward_of(backward_choices(i, x, weight, name))
        for i, (weight, name) in enumerate(zip(weights, names, strict=True))
    )


def backward_choices(i: int, x: Tensor, weight: Tensor, activation: str) -> tuple[Choice, ...]:
    """The choices for the backward of layer ``i``, whole or in pieces, as linear_act makes them."""
    return select_backward(problem_of(i, x, weight, True, activation, True))


def problem_of(
    i: int, x: Tensor, weight: Tensor, bias: bool, activation: str, grad: bool
) -> Problem:
    """The forward of layer ``i`` as a Problem of linear_act."""
    n, k = weight.shape
    transposed = "kn" if weight.t().is_contiguous() else "strided"
    return linear_act.problem(
        "forward",
        x.shape[0],
        k,
        n,
        dtype=str(x.dtype).removeprefix("torch."),
        device=x.device.type,
        activation=activation,
        bias=bias,
        needs_grad=grad,
        x_layout=linear_act.x_layout_of(x) if i == 0 else "rows",
        w_layout="nk" if weight.is_contiguous() else transposed,
        precision=matmul_precision(x.dtype),
        captured=is_captured(x),
    )


def layers_of(p: Problem) -> tuple[Problem, ...]:
    """The linear_act Problem of each layer of an mlp Problem, with its piece, in their order. Of
    ``"some"`` biases every second layer is taken to have one."""
    biased = {"yes": (True, True), "no": (False, False), "some": (True, False)}[p.option("bias")]
    layers = zip(pairwise(widths_of(p)), activations_of(p), strict=True)
    return tuple(
        linear_act.problem(
            p.piece,
            *(p.dim("M"), k, n),
            dtype=p.dtype,
            device=p.device,
            activation=name,
            bias=biased[i % 2],
            needs_grad=p.needs_grad,
            x_layout=linear_x_layout(p) if i == 0 else "rows",
            w_layout="kn" if p.option("w") == "mixed" and i % 2 == 0 else "nk",
            precision=p.precision,
            captured=p.captured,
        )
        for i, ((k, n), name) in enumerate(layers)
    )


def layer_problems(p: Problem) -> tuple[Problem, ...]:
    """The distinct linear_act Problems whose choices ``layerwise`` takes for an mlp Problem: the
    forward of every layer, and with ``needs_grad`` the pieces of its backward."""
    found: dict[Problem, None] = {}
    for layer in layers_of(p.with_piece("forward")):
        found[layer] = None
        options = tuple((k, "yes" if k == "bias" else v) for k, v in layer.options)
        biased = replace(layer, options=options)
        for piece in (*linear_act.BACKWARD_PIECES, linear_act.WHOLE_BACKWARD):
            if p.needs_grad and (
                piece != linear_act.WHOLE_BACKWARD or whole_is_measured(biased.with_piece(piece))
            ):
                found[biased.with_piece(piece)] = None
    return tuple(found)


def _buffers(x: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """Two flat buffers of this thread, each as large as the widest hidden activation."""
    numbers = x.shape[0] * max((w.shape[0] for w in weights[:-1]), default=0)
    held = getattr(_held, "buffers", None)
    if held is not None and held[0].dtype is x.dtype and held[0].numel() >= numbers:
        return held  # type: ignore[no-any-return]
    with torch.inference_mode(False):  # an inference tensor could not be written to later
        fresh = (x.new_empty(numbers), x.new_empty(numbers))
    if numbers * x.itemsize * 2 <= _MAX_BUFFER_BYTES:
        _held.buffers = fresh
    return fresh


def _remember(key: Any, plan: Any) -> Any:
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan
