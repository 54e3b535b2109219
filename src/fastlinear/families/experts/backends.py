"""The family record of experts: its backends and least cost.

A training call is chosen as one step: a backward takes the slots as its own forward sorted them.
Nothing is predicted: the first that can serve is taken. On CPUs that is ``cpp``, on GPUs
``triton``, which was faster than PyTorch's ops at every size that was measured. The products of
both are those that ragged_linear takes by its prices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from fastlinear.core.cost import Cost
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.dispatch.backend import Backend, Family, deferred, register_family, why_no_gpu
from fastlinear.dispatch.drawn import Draw
from fastlinear.families.experts.cpu import passes as cpp
from fastlinear.families.experts.gate import PLAIN
from fastlinear.families.experts.problem import NAME, PIECES, SPACE, problem
from fastlinear.families.grouped.ragged.backends import FAMILY as RAGGED
from fastlinear.families.grouped.ragged.problem import problem as product
from fastlinear.kernels import CPP_SOURCES

__all__ = ["FAMILY", "NAME", "problem"]

_HOME = "fastlinear.families.experts"
_OWN = tuple(f"families/experts/{name}.py" for name in ("routed", "products", "gate", "formula"))
_REFERENCE = ("families/experts/reference.py", "families/grouped/ragged/products.py")
_MOST_SLOTS = (1 << 31) - (1 << 14)  # programs count past the last by a block


def _sources(backends: Collection[str], *own: str) -> tuple[str, ...]:
    """What a backend runs from: our files, and those of ragged_linear's of these names."""
    every = RAGGED.candidates("forward", on_request=True)
    ragged = (source for b in every if b.name in backends for source in b.sources)
    return tuple(dict.fromkeys((*_OWN, *own, *ragged)))


_TRITON_SOURCES = _sources(
    ("triton", "planes", "cuda"),
    *("families/experts/triton", "families/gated/triton/gate_kernels.py"),
    *("families/gated/triton/config.py",),
)
_CPP_SOURCES = (*_sources(("cpp",), "families/experts/cpu", *CPP_SOURCES), *_REFERENCE[1:])


def _products(p: Problem) -> tuple[Problem, Problem]:
    """The two products of a call, as ragged_linear's."""
    slots, experts, h, i = p.dim("M") * p.dim("TOP"), p.dim("E"), p.dim("H"), p.dim("I")
    facts: Mapping[str, Any] = {
        "dtype": p.dtype,
        "device": p.device,
        "bias": p.option("bias") != "no",
        "needs_grad": p.needs_grad,
        "strides": p.option("strides"),
        "precision": p.precision,
        "captured": p.captured,
    }
    return (
        product("forward", slots, experts, h, 2 * i, **facts),
        product("forward", slots, experts, i, h, **facts),
    )


def _why_no_product(p: Problem, backend: str) -> str | None:
    """Why ragged_linear's backend of that name cannot serve one of a call's products, or None."""
    every = RAGGED.candidates("forward", on_request=True)
    served = next(b for b in every if b.name == backend)
    return next((why for q in _products(p) if (why := served.reason_not(q)) is not None), None)


def _too_many(p: Problem) -> str | None:
    slots = p.dim("M") * p.dim("TOP")
    return f"counts slots in 32 bits, the call has {slots}" if slots > _MOST_SLOTS else None


def _reason_not_eager(p: Problem) -> str | None:
    if p.captured and p.option("sizes") != "device":
        return "a CUDA graph cannot read how many rows an expert has"
    if p.option("recompute") == "yes":
        return "PyTorch's own autograd keeps what its ops read, not x alone"
    return None


def _reason_not_triton(p: Problem) -> str | None:
    return why_no_gpu(p, "triton") or _why_no_product(p, "triton") or _too_many(p)


def _reason_not_cpp(p: Problem) -> str | None:
    return cpp.reason_not(p) or _too_many(p)


def _reason_not_invariant(p: Problem) -> str | None:
    passes = cpp.reason_not(p) if p.device == "cpu" else _reason_not_triton(p)
    return passes or _why_no_product(p, BATCH_INVARIANT) or _too_many(p)


def _make_inputs(p: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Random inputs of a Problem's piece. Some slots name experts that are not here."""
    m, experts, top, h, i = (p.dim(name) for name in ("M", "E", "TOP", "H", "I"))
    draw = Draw(p, device, seed)

    def matrix(k: int, n: int) -> torch.Tensor:
        if p.option("layout") == "kn":
            return draw(experts, k, n, scale=k**-0.5).mT
        return draw(experts, n, k, scale=k**-0.5)

    x, weights = draw(m, h), (matrix(h, 2 * i), matrix(i, h))
    index = torch.randint(-1, experts + 1, (m, top), generator=draw.generator, device=device)
    weight = torch.rand(m, top, generator=draw.generator, device=device).to(draw.dtype)
    bias = p.option("bias")
    biases = None if bias == "no" else draw(experts, 2 * i), draw(experts, h)
    routing = index, weight, biases[0], biases[1] if bias == "yes" else None
    numbers = "1.0 1.5 0.5" if p.option("clamped") == "yes" else PLAIN
    options = (
        p.option("activation"),
        p.option("order"),
        numbers,
        "0",
        p.option("recompute") == "yes",
    )
    if p.piece == "forward":
        return x, weights, routing, *options
    return x, weights, routing, *options, draw(m, h)


def _reference(p: Problem, inputs: tuple[Any, ...]) -> Any:
    return deferred(f"{_HOME}.spec:eager_{p.piece}")(*inputs)


def _examples(facts: Mapping[str, Any]) -> Mapping[str, Problem]:
    return {"": problem("forward", 512, 8, 2, 256, 256, **facts)}


def _cost(p: Problem) -> Cost:
    """Least flops and bytes of tokens that need every expert: every tensor once."""
    m, experts, top, h, i = (p.dim(name) for name in ("M", "E", "TOP", "H", "I"))
    size, flops = FLOAT_DTYPES[p.dtype].itemsize, 6.0 * m * top * h * i
    biases = {"no": 0, "some": 2 * i, "yes": 2 * i + h}[p.option("bias")]
    parameters = experts * (3 * h * i + biases)
    routing = m * top * 8
    if p.piece == "forward":
        return Cost(flops, size * (m * (2 * h + top) + parameters) + routing)
    return Cost(3 * flops, size * (m * (4 * h + 2 * top) + 2 * parameters) + routing)


FAMILY = register_family(
    Family(
        name=NAME,
        pieces=PIECES,
        backends=tuple(
            Backend(
                *(NAME, piece, name, f"{_HOME}.spec:{name}_{piece}", reason_not, sources),
                on_request=name == BATCH_INVARIANT,
            )
            for piece in PIECES
            for name, reason_not, sources in (
                ("cpp", _reason_not_cpp, _CPP_SOURCES),
                ("triton", _reason_not_triton, _TRITON_SOURCES),
                ("eager", _reason_not_eager, _REFERENCE),
                (
                    BATCH_INVARIANT,
                    _reason_not_invariant,
                    (
                        *_sources((BATCH_INVARIANT,), "families/experts/cpu", *CPP_SOURCES),
                        *_TRITON_SOURCES,
                    ),
                ),
            )
        ),
        make_inputs=_make_inputs,
        reference=_reference,
        cost=_cost,
        cold=True,
        timed=deferred(f"{_HOME}.spec:timed"),
        examples=_examples,
        space=SPACE,
        command=f"{_HOME}.command:COMMAND",
    )
)
