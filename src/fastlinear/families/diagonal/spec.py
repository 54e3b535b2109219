"""The ``OpSpec`` of diagonal_linear, and its front ends.

``FRONT`` serves calls that return a new tensor, ``OUT`` those that write to a tensor of the
caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core import calls
from fastlinear.core.problem import Problem
from fastlinear.dispatch.select import Choice
from fastlinear.families.diagonal import reference
from fastlinear.families.diagonal.autograd import Formula, applied
from fastlinear.families.diagonal.problem import NAME, STEP, problem_of
from fastlinear.families.diagonal.validation import validate, validate_out
from fastlinear.fastpath import recorded, recorder
from fastlinear.op import library
from fastlinear.op.front import Front, choices
from fastlinear.op.spec import Arguments, OpSpec, Plan, Resolved, inferring
from fastlinear.op.step import Step
from fastlinear.op.timing import Timed

_Rest = tuple[Tensor | None, Tensor | None]


def _validate(x: Tensor, weight: Tensor, rest: _Rest, activation: str, backend: Any) -> None:
    validate(x, weight, rest[0], activation, rest[1], backend)


def _reference(x: Tensor, weight: Tensor, rest: _Rest, activation: str, _: Any = None) -> Tensor:
    return reference.diagonal_linear(x, weight, rest[0], activation, rest[1])


def _problem(arguments: Arguments, grad: bool) -> Problem:
    x, _, (bias, residual, *_), activation, _ = arguments
    return problem_of(x, bias, residual, activation, grad, calls.is_captured(x))


def _resolve(arguments: Arguments, grad: bool, _: bool) -> Resolved:
    x, _, (bias, residual), activation, _ = arguments
    own = _own(activation, bias is not None, residual is not None or reference.widens(x))
    if x.device.type not in ("cpu", "cuda"):
        return Resolved(own, by_torch=True)
    chosen = choices(SPEC, arguments, grad)
    if x.numel() == 0 or _all_eager(chosen):
        if grad or x.is_cuda or x.numel() == 0:
            return Resolved(own, own, by_torch=True)
        return inferring(own, x, by_torch=True)
    if grad:
        return _train(arguments, chosen)
    return inferring(_inference(chosen[0].load(), activation), x)


def _train(arguments: Arguments, chosen: tuple[Choice, ...]) -> Resolved:
    x, activation = arguments[0], arguments[3]
    formula = Formula(activation, chosen[0].load(), chosen[1].load())
    plan = applied(formula)
    if calls.is_captured(x):
        return Resolved(plan, plan)
    return Resolved(plan, plan, partial(recorded.node, formula))


def _all_eager(chosen: tuple[Choice, ...]) -> bool:
    return {c.backend.name for c in chosen if c.problem.piece != STEP} == {"eager"}


def _inference(run: Callable[..., Tensor], activation: str) -> Plan:
    def plan(x: Tensor, weight: Tensor, rest: _Rest) -> Tensor:
        return run_rows(run, x, weight, rest, activation)

    return plan


def run_rows(
    run: Callable[..., Tensor], x: Tensor, weight: Tensor, rest: _Rest, activation: str
) -> Tensor:
    """A forward backend on x (..., K) and rest (bias, residual), whose parameters become dense."""
    bias, residual = rest
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    if x.dim() == 2:
        return run(x, weight, bias, activation, residual, None)
    k = x.shape[-1]
    rows = None if residual is None else residual.reshape(-1, k)
    return calls.as_result(run(x.reshape(-1, k), weight, bias, activation, rows, None), x.shape)


def _own(activation: str, bias: bool, more: bool) -> Plan:
    """PyTorch's own ops, with as little around them as can be.

    ``more``: a residual, or float16 that computes in float32.
    """
    if more:
        return lambda x, weight, rest: _reference(x, weight, rest, activation)
    pre = _sum if bias else _product
    if activation == "none":
        return pre
    value = activation_of(activation).value
    return lambda x, weight, rest: value(pre(x, weight, rest))


def _sum(x: Tensor, weight: Tensor, rest: Any) -> Tensor:
    return x * weight + rest[0]


def _product(x: Tensor, weight: Tensor, _: Any) -> Tensor:
    return x * weight


def _cast(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    """Under autocast the operands of the product; a residual of another dtype is added after it,
    as torch promotes, and ``out`` is the result's."""
    x, weight, (bias, *rest), *options = arguments
    x, weight, bias = calls.cast_all((x, weight, bias), dtype)
    return (x, weight, (bias, *rest), *options)


def _residual_outside(arguments: Arguments) -> Tensor | None:
    """The residual where autocast gives the product another dtype, so that it is added after."""
    x, residual = arguments[0], arguments[2][1]
    if not isinstance(residual, Tensor) or not isinstance(x, Tensor):
        return None
    dtype = calls.autocast_dtype(x)
    return None if dtype is None or residual.dtype == dtype else residual


def _redirect(arguments: Arguments) -> Tensor | None:
    residual = _residual_outside(arguments)
    if residual is None:
        return None
    x, weight, (bias, _), *options = arguments
    if residual.shape != x.shape:
        validate(x, weight, bias, options[0], residual)  # raises; the call checks the rest
    y: Tensor = residual + FRONT.call(x, weight, (bias, None), *options)
    return y


def _compiled(arguments: Arguments, grad: bool) -> Tensor:
    x, weight, rest, activation, backend = arguments
    y: Tensor = library.call(NAME, x, weight, *rest[:2], activation, grad, backend or "")
    return y


def _public(arguments: Arguments) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    x, weight, (bias, residual, *out), activation, backend = arguments
    options = {"activation": activation, "residual": residual, "backend": backend}
    return NAME, (x, weight, bias), options | ({"out": out[0]} if out else {})


SPEC = OpSpec(
    name=NAME,
    operands=("x", "weight", ("bias", "residual")),
    options=("activation", "backend"),
    validate=_validate,
    reference=_reference,
    resolve=_resolve,
    problem=_problem,
    train=_train,
    compiled=_compiled,
    public=_public,
    cast=_cast,
    redirect=_redirect,
)
FRONT = Front(SPEC)
STEPS = Step(FRONT)
eager, pieces = STEPS.eager, STEPS.pieces


def _as_call(inputs: tuple[Any, ...], backend: str) -> Arguments:
    x, weight, bias, activation, residual, _ = inputs
    return x, weight, (bias, residual), activation, backend


timed = Timed(FRONT, _as_call)

# --------------------------------------------------------------------------------------------
# Calls with ``out``: (x, weight, (bias, residual, out), activation, backend)


def _validate_out(
    x: Tensor, weight: Tensor, rest: tuple[Any, ...], activation: str, backend: Any
) -> None:
    bias, residual, out = rest
    validate(x, weight, bias, activation, residual, backend)
    validate_out(out, x, x.dtype, (x, weight, bias, residual))


def _reference_out(
    x: Tensor, weight: Tensor, rest: tuple[Any, ...], activation: str, _: Any = None
) -> Tensor:
    y = _reference(x, weight, rest[:2], activation)
    out: Tensor = rest[2]
    return out.copy_(y)


def _redirect_out(arguments: Arguments) -> Tensor | None:
    x, weight, (bias, residual, out), activation, backend = arguments
    lazy = isinstance(out, Tensor) and out.is_neg()
    if not lazy and _residual_outside(arguments) is None:
        return None
    y = FRONT.call(x, weight, (bias, residual), activation, backend)
    validate_out(out, x, y.dtype, (x, weight, bias, residual))
    return out.copy_(y)  # type: ignore[no-any-return]


def _resolve_out(arguments: Arguments, _: bool, autocast: bool) -> Resolved:
    x, weight, (bias, residual, _), activation, backend = arguments
    call = (x, weight, (bias, residual), activation, backend)
    inner = _resolve(call, False, autocast)
    name = "eager"
    if x.device.type in ("cpu", "cuda") and x.numel():
        name = choices(SPEC, call, False)[0].backend.name
    if name == "eager":

        def copied(x: Tensor, weight: Tensor, rest: tuple[Any, ...]) -> Tensor:
            bias, residual, out = rest
            validate_out(out, x, x.dtype, (x, weight, bias, residual))  # addresses are no fact
            y: Tensor = out.copy_(inner.plan(x, weight, (bias, residual)))
            return y

        return Resolved(copied, copied)
    run = choices(SPEC, call, False)[0].load()

    def plan(x: Tensor, weight: Tensor, rest: tuple[Any, ...]) -> Tensor:
        bias, residual, out = rest
        validate_out(out, x, x.dtype, (x, weight, bias, residual))
        recorder.claim(out)
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
        k = x.shape[-1]
        rows = None if residual is None else residual.reshape(-1, k)
        run(x.reshape(-1, k), weight, bias, activation, rows, out.view(-1, k))
        if not out.is_inference():  # a backward that has kept what was there is to know
            torch.autograd.graph.increment_version(out)
        return out  # type: ignore[no-any-return]

    return inferring(plan, x)


def _compiled_out(arguments: Arguments, grad: bool) -> Tensor:
    y: Tensor = arguments[2][2].copy_(_compiled(arguments, grad))
    return y


OUT = Front(
    replace(
        SPEC,
        name=f"{NAME}.out",
        operands=("x", "weight", ("bias", "residual", "out")),
        validate=_validate_out,
        reference=_reference_out,
        resolve=_resolve_out,
        compiled=_compiled_out,
        redirect=_redirect_out,
    )
)
