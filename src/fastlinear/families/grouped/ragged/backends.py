"""The family record of ragged_linear: its backends and least cost.

A training call is chosen as one step: a backward takes the sizes as its own forward left them.
"""

from __future__ import annotations

from typing import Any

import torch

from fastlinear.core.compare import KINKED
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.dispatch.backend import (
    register_family,
    why_no_gpu,
)
from fastlinear.dispatch.drawn import Draw, linear_clear_of_kinks
from fastlinear.families.grouped import one_step
from fastlinear.families.grouped.ragged import planes
from fastlinear.families.grouped.ragged.cpu import cpp
from fastlinear.families.grouped.ragged.cuda import backend as cuda
from fastlinear.families.grouped.ragged.problem import NAME, SPACE, problem
from fastlinear.families.grouped.triton import config
from fastlinear.families.linear import batch_invariant as layers
from fastlinear.kernels import CPP_SOURCES, CUDA_SOURCES, TRITON_SOURCES

__all__ = ["FAMILY", "NAME", "problem"]

MAX_GROUPS = 65535
"""Groups that a launch of Triton's kernels serves."""
_TRITON_SOURCES = (
    *("families/grouped/ragged/formula.py", "families/grouped/ragged/triton"),
    *("families/grouped/triton", *TRITON_SOURCES),
)
_CPP_SOURCES = (
    *("families/grouped/ragged/formula.py", "families/grouped/ragged/cpu"),
    *("families/grouped/cpu", *CPP_SOURCES),
)
_PLANES_SOURCES = (
    *("families/grouped/ragged/formula.py", "families/grouped/ragged/planes.py"),
    *("families/linear/cuda", *CUDA_SOURCES),
)
_CUDA_SOURCES = (
    *("families/grouped/ragged/formula.py", "families/grouped/ragged/layout.py"),
    *("families/grouped/ragged/cuda", "families/grouped/ragged/triton"),
    *("families/grouped/triton", "families/linear/triton"),
    *("families/linear/cuda", *CUDA_SOURCES, *TRITON_SOURCES),
)
_LINEAR_SOURCES = ("families/linear/batch_invariant.py", "families/linear/cpu", *CPP_SOURCES)


def _reason_not_eager(p: Problem) -> str | None:
    """PyTorch's own ops slice x by sizes that they read from the device."""
    return "a CUDA graph cannot read the sizes of the groups" if p.captured else None


def _reason_not_triton(p: Problem) -> str | None:
    if (why := why_no_gpu(p, "triton")) is not None:
        return why
    groups = p.dim("G")
    if groups > MAX_GROUPS:
        return f"serves at most {MAX_GROUPS} groups, the call has {groups}"
    sizes, capability = (p.dim("M"), 1, p.dim("K"), p.dim("N")), torch.cuda.get_device_capability()
    return config.reason_not(*sizes, FLOAT_DTYPES[p.dtype], capability)


def _reason_not_invariant(p: Problem) -> str | None:
    why = layers.reason_not(p)
    return why if why is not None or p.device == "cpu" else _reason_not_triton(p)


def _make_inputs(p: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Random inputs of a Problem's piece: sizes of groups vary, and one row in 64 has none.

    Few rows go to as many groups, as tokens go to experts.
    """
    m, groups, k, n = (p.dim(name) for name in ("M", "G", "K", "N"))
    act, draw = p.option("activation"), Draw(p, device, seed)
    shares = torch.rand(groups, generator=draw.generator, device=device).double()
    ends = (shares.cumsum(0) / shares.sum() * (m - m // 64)).round().long()
    sizes = ends.diff(prepend=ends.new_zeros(1))
    weight, bias = draw(groups, n, k, scale=k**-0.5), None
    if p.option("bias") == "yes":
        bias = draw(groups, n)
    x, dy = draw(m, k), draw(m, n)
    if p.piece == "forward":
        return x, weight, (sizes, bias), act
    if act in KINKED:
        parts = x.split([*sizes.tolist(), m - int(sizes.sum())])
        biases = [None] * groups if bias is None else bias.unbind()
        each = zip(parts, weight, biases, strict=False)
        x = torch.cat([*(linear_clear_of_kinks(*group, draw) for group in each), parts[-1]])
    return x, weight, (sizes, bias), act, dy


FAMILY = register_family(
    one_step.family(
        NAME,
        "fastlinear.families.grouped.ragged",
        backends=(
            ("eager", _reason_not_eager, ("families/grouped/ragged/products.py",)),
            ("triton", _reason_not_triton, _TRITON_SOURCES),
            ("planes", planes.reason_not, _PLANES_SOURCES),
            ("cuda", cuda.reason_not, _CUDA_SOURCES),
            ("cpp", cpp.reason_not, _CPP_SOURCES),
            (BATCH_INVARIANT, _reason_not_invariant, (*_TRITON_SOURCES, *_LINEAR_SOURCES)),
        ),
        space=SPACE,
        make_inputs=_make_inputs,
    )
)
