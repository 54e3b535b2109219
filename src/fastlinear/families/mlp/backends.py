"""The family record of mlp: its pieces, backends and least cost.

Light on purpose: backends are named here and imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import KINKED, clear_of_kinks
from fastlinear.core.cost import Cost
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.dispatch.backend import (
    Backend,
    Family,
    always,
    deferred,
    register_family,
    widened_backends,
)
from fastlinear.dispatch.drawn import Draw
from fastlinear.families.linear import backends as linear_act
from fastlinear.families.linear.padded_problem import padded_size
from fastlinear.families.mlp import batch_invariant, layerwise, reference
from fastlinear.families.mlp.cpu import whole as whole_cpp
from fastlinear.families.mlp.cuda import backend
from fastlinear.families.mlp.problem import (
    NAME,
    PIECES,
    SPACE,
    STEP,
    activations_of,
    backward_of,
    keeps_hidden,
    problem,
    widths_of,
)
from fastlinear.families.mlp.triton import backend as whole_triton
from fastlinear.kernels import CPP_SOURCES, CUDA_SOURCES, TRITON_SOURCES

__all__ = ["FAMILY", "NAME", "PIECES", "cost", "problem"]

_HERE = "fastlinear.families.mlp"
_CPP_SOURCES = (
    *("families/mlp/cpu", *CPP_SOURCES),
    *("fastpath/lookup.cpp", "fastpath/call.h", "fastpath/plans.h"),
)
_TRITON_SOURCES = ("families/mlp/triton", *TRITON_SOURCES)
_CUDA_SOURCES = ("families/mlp/cuda", *CUDA_SOURCES)
_LAYER_SOURCES = (*linear_act.PIECES_SOURCES, "families/linear/selection.py")
"""What layerwise chooses from and runs."""


def _has_bias(p: Problem, layer: int) -> bool:
    kind = p.option("bias")
    return kind == "yes" or (kind == "some" and layer % 2 == 0)


def _make_inputs(p: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Random inputs of a Problem's piece, scaled so that pre-activations are near unit size."""
    widths, m = widths_of(p), p.dim("M")
    draw = Draw(p, device, seed)

    weights = []
    for i, (k, n) in enumerate(pairwise(widths)):
        # a square doubles what is large: smaller weights keep a chain of them in range
        scale = ((0.3 if p.option("activation") == "relu2" else 2.0) / max(k, 1)) ** 0.5
        transposed = p.option("w") == "mixed" and i % 2 == 0
        weights.append(draw(k, n, scale=scale).t() if transposed else draw(n, k, scale=scale))
    biases = tuple(
        draw(n, scale=0.5) if _has_bias(p, i) else None for i, n in enumerate(widths[1:])
    )
    if p.option("x") == "strided":
        x = draw(widths[0], m).t()
    elif p.option("x") == "pitched":
        x = draw(m, padded_size(widths[0] + 1))[:, : widths[0]]
    elif p.option("x") == "rows_odd":
        x = draw(m, 2 * widths[0] + 1)[:, : widths[0]]
    else:
        x = draw(m, widths[0])
    names = p.option("activation"), p.option("final")
    if p.piece == "forward":
        return x, tuple(weights), biases, *names, p.needs_grad
    dy = draw(m, widths[-1])
    if p.piece == STEP:
        if p.option("x") == "rows" and KINKED & set(names):

            def kinked(rows: Tensor) -> Iterator[Tensor]:
                given = [None if b is None else b.to(rows.dtype) for b in biases]
                for w, b, name in zip(weights, given, activations_of(p), strict=True):
                    pre = torch.nn.functional.linear(rows, w.to(rows.dtype), b)
                    if name in KINKED:
                        yield pre
                    rows = activation_of(name).value(pre)

            x, _ = clear_of_kinks(x, kinked, lambda rows: draw(rows, widths[0]))
        return x, tuple(weights), biases, *names, dy
    _, saved = reference.forward(x, tuple(weights), biases, *names, True, keeps_hidden(p))
    needs = (True, (True,) * len(weights), tuple(b is not None for b in biases))
    return dy, x, tuple(weights), saved, *names, needs


def _reference(p: Problem, inputs: tuple[Any, ...]) -> Any:
    if p.piece == STEP:
        return _STEP_EAGER.load(p)(*inputs)
    return getattr(reference, p.piece)(*inputs)


def cost(p: Problem) -> Cost:
    """Least flops and bytes: weights, x and y once; what training keeps is counted where needed."""
    if p.piece == STEP:
        parts = [cost(p.with_piece(piece)) for piece in PIECES]
        return Cost(sum(c.flops for c in parts), sum(c.bytes for c in parts))
    widths, m = widths_of(p), p.dim("M")
    size = FLOAT_DTYPES[p.dtype].itemsize
    names = activations_of(p)
    layers = list(pairwise(widths))
    weights = sum(k * n for k, n in layers)
    biases = sum(n for i, n in enumerate(widths[1:]) if _has_bias(p, i))
    # everything saved but the last layer's output, which is y
    kept = sum(m * n for n in widths[1:-1])
    if activation_of(names[-1]).saved == "pre":
        kept += m * widths[-1]
    if p.piece == "forward":
        saved = kept if p.needs_grad else 0
        numbers = m * widths[0] + weights + biases + m * widths[-1] + saved
        return Cost(2.0 * m * weights, size * numbers)
    if activation_of(names[-1]).saved == "output":
        kept += m * widths[-1]
    numbers = m * widths[-1] + kept + 2 * m * widths[0] + 2 * weights + biases
    return Cost(4.0 * m * weights, size * numbers)


def _backend(
    piece: str,
    name: str,
    module: str,
    reason_not: Callable[[Problem], str | None],
    sources: tuple[str, ...] = (),
) -> Backend:
    return Backend(NAME, piece, name, f"{_HERE}.{module}:{piece}", reason_not, sources)


def _reason_not_pieces(p: Problem) -> str | None:
    return "float64 is left to PyTorch's own ops" if p.dtype == "float64" else None


def _examples(facts: Mapping[str, Any]) -> Mapping[str, Problem]:
    return {
        "": problem("forward", 16, (64,) * 9, **facts),
        "wide layers": problem("forward", 4096, (4096,) * 3, **facts),
    }


_STEP_EAGER = Backend(NAME, STEP, "eager", f"{_HERE}.spec:eager", always)
_PIECES_SOURCES = (
    *("families/mlp/autograd.py", "families/mlp/layerwise.py"),
    *(*_CPP_SOURCES, *_TRITON_SOURCES, *_CUDA_SOURCES, *_LAYER_SOURCES),
)


FAMILY = register_family(
    Family(
        name=NAME,
        pieces=(*PIECES, STEP),
        backends=(
            _STEP_EAGER,
            Backend(
                NAME, STEP, "pieces", f"{_HERE}.spec:pieces", _reason_not_pieces, _PIECES_SOURCES
            ),
            *(_backend(p, "eager", "reference", always) for p in PIECES),
            *(
                _backend(p, "layerwise", "layerwise", layerwise.reason_not, _LAYER_SOURCES)
                for p in PIECES
            ),
            *(
                _backend(p, "whole_cpp", "cpu.whole", whole_cpp.reason_not, _CPP_SOURCES)
                for p in PIECES
            ),
            *(
                _backend(
                    p, "whole_triton", "triton.backend", whole_triton.reason_not, _TRITON_SOURCES
                )
                for p in PIECES
            ),
            _backend("forward", "whole_cuda", "cuda.backend", backend.reason_not, _CUDA_SOURCES),
            *(
                Backend(
                    *(NAME, p, "rows_cuda", f"{_HERE}.cuda.rows_backend:{p}"),
                    *(backend.reason_not_rows, (*_CUDA_SOURCES, *_LAYER_SOURCES)),
                )
                for p in PIECES
            ),
            Backend(
                *(NAME, "backward", "tasks_cuda", f"{_HERE}.cuda.tasks_backend:backward"),
                *(backend.reason_not_tasks, (*_CUDA_SOURCES, *_LAYER_SOURCES)),
            ),
            Backend(
                *(NAME, "forward", BATCH_INVARIANT, f"{_HERE}.batch_invariant:forward"),
                *(batch_invariant.reason_not, _LAYER_SOURCES),
                on_request=True,
            ),
            *widened_backends(NAME, *PIECES),
        ),
        make_inputs=_make_inputs,
        reference=_reference,
        cost=cost,
        cpu_work=deferred(f"{_HERE}.cpu_work:work"),
        gpu_work=deferred(f"{_HERE}.gpu_work:work"),
        examples=_examples,
        space=SPACE,
        command=f"{_HERE}.command:COMMAND",
        tuning_order=deferred(f"{_HERE}.selection:tuning_order"),
        backward_of=backward_of,
        timed=deferred(f"{_HERE}.spec:timed"),
        removed={"graph": "Use fastlinear.graphed, which records a module or a function."},
    )
)
