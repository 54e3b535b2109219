"""Products of groups of unequal sizes in one launch of CUDA C++, for sm_80 and later.

A backward is one launch for all dW and db, whose rows are divided among blocks so that they fill
the chip, and one for all dx, in which shares of dW and db are added up. In float32 the depth of y
and of dx may be divided too: a launch behind theirs adds their shares up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import why_no_gpu
from fastlinear.families.grouped.unequal import layout
from fastlinear.families.grouped.unequal.cuda.compiled import KINDS
from fastlinear.families.grouped.unequal.cuda.config import (
    ADD,
    FORWARD,
    GRAD_INPUT,
    GRAD_WEIGHT,
    SINGLE,
    Choice,
    choice_of,
    odd_rows,
    single_choice_of,
)
from fastlinear.families.grouped.unequal.cuda.launches import (
    Kind,
    Pitches,
    Pointers,
    Product,
    run,
    share_numbers,
)
from fastlinear.families.grouped.unequal.layout import Backward, Forward

Tensors = Sequence[Tensor]
Share = tuple[tuple[int, int, int], *tuple[Any, ...]]
"""(rows, cols, parts) of a result, then where its shares, itself and db are; None for no db. Of y
and dx the pre-activation for db, and the bias."""


@dataclass(frozen=True)
class Choices:
    """How a call is computed; None for what is expected to take least.

    Attributes:
        forward, grad_weight, grad_input: each product.
        once: the launch of dW writes the gradient of the pre-activations and that of dx reads it,
            where every group that has dx has dW; else both derive it. None for 16-bit dtypes only:
            float32 blocks would wait for what they read before they write.
    """

    forward: Choice | None = None
    grad_weight: Choice | None = None
    grad_input: Choice | None = None
    once: bool | None = None


AUTOMATIC = Choices()


def reason_not(problem: Problem) -> str | None:
    """Why the kernels cannot serve a Problem, or None."""
    if (why := why_no_gpu(problem)) is not None:
        return why
    if FLOAT_DTYPES[problem.dtype] not in KINDS:
        return f"serves float32, bfloat16 and float16, not {problem.dtype}"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return f"needs compute capability 8.0, the device has {capability[0]}.{capability[1]}"
    if problem.option("numbers") != "32":
        return "serves matrices of fewer than 2^31 numbers"
    return None


def forward(call: Forward, device: torch.device, choices: Choices = AUTOMATIC) -> None:
    """Compute y and, where it is kept, the pre-activation: one launch for every ``MAX_GROUPS``
    groups, and another where they leave shares. float32 accumulation, deterministic.

    Args:
        call: of float32, bfloat16 or float16.
        device: which one.
        choices: how.
    """
    for product in _forward(call, device, choices):
        run(product, device)


def backward(call: Backward, device: torch.device, choices: Choices = AUTOMATIC) -> None:
    """Compute the gradients: one launch for all dx, one for all dW and db, one for shares of dx.

    Sums over tokens in float32, in a fixed order; exactly 0 for a group without tokens.
    """

    for product in _backward(call, device, choices):
        run(product, device)


def _forward(call: Forward, device: torch.device, choices: Choices) -> list[Product]:
    size = call.dtype.itemsize
    ys = [(call.y, size * at) for at in call.offsets]
    pres = None if call.pre is None else [(call.pre, size * at) for at in call.offsets]
    operands = _begin(call.xs), None, _begin(call.weights), _begin(call.biases)
    sizes = tuple([(m, n, k) for m, n, k in call.sizes])
    widths = tuple([k for _, _, k in sizes])
    pitches = _unless_dense((call.x_pitch, widths), (widths, widths))
    which = FORWARD, call.activation, pres is not None
    choice = choices.forward or _choice(sizes, FORWARD, False, pitches, call.dtype, device)
    to, places = _divided(choice, sizes, ys, device)
    product = _product(which, call.dtype, sizes, (*operands, to, pres), pitches, choice)
    if not places:
        return [product]
    of_groups = [(None if pres is None else pres[g], operands[3][g]) for g, *_ in places]
    shares = [(*share, *more) for (_, *share), more in zip(places, of_groups, strict=True)]
    return [product, _sums(shares, call.dtype, device, which[1:])]


def _divided(
    choice: Choice, sizes: Any, results: Sequence[Any], device: torch.device
) -> tuple[list[Any], list[tuple[int, tuple[int, int, int], Any, Any]]]:
    """Where blocks write: results, or memory of their shares; and of each group with shares its
    number, (rows, cols, parts), and where shares and result are."""
    parts = [choice.parts(k) if m else 1 for m, _, k in sizes]
    if all(p == 1 for p in parts):
        return list(results), []
    counts = [
        share_numbers(m, n) * p if p > 1 else None
        for (m, n, _), p in zip(sizes, parts, strict=True)
    ]
    total, at = layout.placed(tuple(counts), torch.float32.itemsize)
    memory = torch.empty(total, dtype=torch.float32, device=device)
    to, shares = list(results), []
    for g, begin in enumerate(at):
        if begin is not None:
            to[g] = memory, torch.float32.itemsize * begin
            shares.append((g, (*sizes[g][:2], parts[g]), to[g], results[g]))
    return to, shares


def _sums(
    shares: Sequence[Share],
    dtype: torch.dtype,
    device: torch.device,
    finish: tuple[str, bool] = ("none", False),
) -> Product:
    """The launch that adds shares of y or dx up behind the one that leaves them; ``finish``: the
    activation, and whether the pre-activation is kept."""
    which, choice = (ADD, *finish), Choice(SINGLE)
    return _product(which, dtype, (), (), None, choice, shares, _overlaps(device))


def _product(
    which: tuple[int, str, bool],
    dtype: torch.dtype,
    sizes: Any,
    pointers: Pointers,
    pitches: Pitches,
    choice: Choice,
    shares: Sequence[Share] = (),
    early: bool = False,
) -> Product:
    shapes = tuple([shape for shape, *_ in shares])
    shared = tuple(zip(*(places for _, *places in shares), strict=True))
    given = tuple([places is not None for places in pointers])
    kind = Kind(which, dtype, sizes, pitches, choice, shapes, given, early)
    return Product(kind, pointers, shared)


def _choice(
    sizes: Any,
    mode: int,
    derived: bool,
    pitches: Pitches,
    dtype: torch.dtype,
    device: torch.device,
) -> Choice:
    units = device_facts(device).units
    if dtype is torch.float32:
        return single_choice_of(sizes, units, mode, derived)
    return choice_of(sizes, units, mode, derived, odd_rows(sizes, mode, pitches))


def _early(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the launch of dx may begin under the end of that of dW."""
    return dtype is not torch.float32 and _overlaps(device)


def _overlaps(device: torch.device) -> bool:
    """Whether a launch may begin under the end of the one before."""
    return device.type == "cuda" and device_facts(device).capability >= (9, 0)


def _unless_dense(pitches: Any, widths: Any) -> Pitches:
    return None if pitches == widths else pitches


def _begin(operands: Sequence[Any]) -> list[tuple[Any, int] | None]:
    return [None if t is None else (t, 0) for t in operands]


def _of(places: Sequence[Any] | None, groups: list[int]) -> Any:
    return None if places is None else [places[g] for g in groups]


def _results(buffer: Any, at: Sequence[int | None], size: int) -> Any:
    return [None if i is None else (buffer, size * i) for i in at]


def _backward(call: Backward, device: torch.device, choices: Choices) -> list[Product]:
    """dW before dx where its launch leaves shares or gradients of the pre-activations for that of
    dx, or that begins under its end; else dx, whose dy was made last."""
    size, which = call.dtype.itemsize, range(len(call.sizes))
    with_dx = [g for g in which if call.dx_at[g] is not None]
    with_dw = [g for g in which if call.dw_at[g] is not None]
    saved: Any = None if call.saved is None else _begin(call.saved)
    if call.pre is not None:
        saved = _results(call.pre, call.offsets, size)
    dpre: Any = None
    once = call.dtype is not torch.float32 if choices.once is None else choices.once
    if once and call.activation != "none" and with_dx and {*with_dx} <= {*with_dw}:
        total = layout.y_offsets(call.sizes, size)[0]
        memory = torch.empty(total, dtype=call.dtype, device=device)
        dpre = _results(memory, call.offsets, size)
    early = bool(with_dw) and _early(call.dtype, device)
    shares: list[Share] = []
    products = []
    if with_dw:
        of_weights, shares = _grad_weight(call, device, choices, with_dw, saved, dpre, early)
        products.append(of_weights)
    if with_dx or shares:
        of_inputs = _grad_input(call, device, choices, with_dx, saved, dpre, shares, early)
        before = dpre is None and not shares and not early
        products = of_inputs + products if before else products + of_inputs
    return products


def _grad_input(
    call: Backward,
    device: torch.device,
    choices: Choices,
    groups: list[int],
    saved: Any,
    dpre: Any,
    shares: list[Share],
    early: bool,
) -> list[Product]:
    """dx of ``groups`` and what ``shares`` add up to; behind it what shares of dx do."""
    sizes = tuple([(m, k, n) for m, n, k in _of(call.sizes, groups)])
    ns, ks = (tuple([size[i] for size in _of(call.sizes, groups)]) for i in (1, 2))
    dys, activation = _begin(call.dys), call.activation
    pitches = _unless_dense((tuple(_of(call.dy_pitch, groups)), ks), (ns, ks))
    if dpre is not None or not groups:
        dys, saved, pitches, activation = dpre or dys, None, None, "none"
    results = _results(call.dx, call.dx_at, call.dtype.itemsize)
    dys, saved, weights, results = (
        _of(places, groups) for places in (dys, saved, _begin(call.weights), results)
    )
    choice = choices.grad_input
    if choice is None:
        choice = _choice(sizes, GRAD_INPUT, activation != "none", pitches, call.dtype, device)
    to, places = _divided(choice, sizes, results or (), device)
    product = _product(
        (GRAD_INPUT, activation, False),
        call.dtype,
        sizes,
        (dys, saved, weights, None, to, None),
        pitches,
        choice,
        shares,
        early,
    )
    if not places:
        return [product]
    return [product, _sums([(*share, None, None) for _, *share in places], call.dtype, device)]


def _grad_weight(
    call: Backward,
    device: torch.device,
    choices: Choices,
    groups: list[int],
    saved: Any,
    dpre: Any,
    early: bool,
) -> tuple[Product, list[Share]]:
    """dW and db of ``groups``, and what is to be added up behind it; gradients of the
    pre-activations are written to ``dpre`` for the groups that have dx."""
    size = call.dtype.itemsize
    sizes = tuple([(n, k, m) for m, n, k in _of(call.sizes, groups)])
    widths = tuple(tuple([size[i] for size in _of(call.sizes, groups)]) for i in (1, 2))
    given = tuple(tuple(_of(pitch, groups)) for pitch in (call.dy_pitch, call.x_pitch))
    pitches, choice = _unless_dense(given, widths), choices.grad_weight
    if choice is None:
        derived = call.activation != "none"
        choice = _choice(sizes, GRAD_WEIGHT, derived, pitches, call.dtype, device)
    dws = _of(_results(call.dw, call.dw_at, size), groups)
    dbs = None if call.db is None else _of(_results(call.db, call.db_at, size), groups)
    to, places = _divided(choice, sizes, dws, device)
    shares = [(*share, None if dbs is None else dbs[i]) for i, *share in places]
    written = None
    if dpre is not None:
        written = [None if call.dx_at[g] is None else dpre[g] for g in groups]
    lists = (_of(places, groups) for places in (_begin(call.dys), saved, _begin(call.xs)))
    product = _product(
        (GRAD_WEIGHT, call.activation, False),
        call.dtype,
        sizes,
        (*lists, written, to, dbs),
        pitches,
        choice,
        early=early,
    )
    return product, shares
