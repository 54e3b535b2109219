"""The Triton backends against a float64 oracle: under Triton's CPU interpreter, and on a GPU.

The same comparisons serve both. Triton reads TRITON_INTERPRET when a kernel is defined, so the
interpreted ones run in a process of their own, started by ``test_under_the_interpreter``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.core.compare import judge
from fastlinear.families.gated import reference
from fastlinear.families.gated.stacking import ORDERS, Biases, Weights
from tests.families.interpreted import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    compares,
    run_interpreted,
    starts_it,
)

if INTERPRETED or ON_GPU:
    from fastlinear.families.gated.triton import backend


# the interpreter truncates to bfloat16 instead of rounding
NARROW = (torch.float16, torch.bfloat16) if ON_GPU else (torch.float16,)
DTYPES = (torch.float32, *NARROW)
# (M, K, H, N): ones, tails on either side of tiles, depths that no block divides
SIZES = ((1, 1, 1, 1), (7, 33, 20, 5), (70, 16, 130, 24), (17, 65, 66, 64), (40, 64, 128, 128))


@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Results and workspaces start as NaN, so that what is never written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def drawn(
    sizes: tuple[int, ...], dtype: torch.dtype, order: str, down: bool, bias: bool, seed: int = 0
) -> Any:
    """x, weights, biases and dy."""
    m, k, h, n = sizes
    generator = torch.Generator().manual_seed(sum(sizes) + 1000 * seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)

    rows = h if order == "apart" else 2 * h
    up = order == "apart"
    weights = Weights(
        draw(rows, k, scale=k**-0.5),
        draw(h, k, scale=k**-0.5) if up else None,
        draw(n, h, scale=h**-0.5) if down else None,
    )
    biases = Biases(
        draw(rows) if bias else None,
        draw(h) if bias and up else None,
        draw(n) if bias and down else None,
    )
    return draw(m, k), weights, biases, draw(m, n if down else h)


def wide(given: Any) -> Any:
    if isinstance(given, tuple):
        found = [wide(t) for t in given]
        return type(given)(*found) if hasattr(given, "_fields") else tuple(found)
    return given.double() if isinstance(given, Tensor) else given


def draws_of(sizes: tuple[int, ...]) -> range:
    """One number's error is luck, so results of a few numbers are judged over many draws."""
    return range(16 if min(sizes) < 16 else 1)


def check(run: Any, piece: str, sets: list[tuple[Any, ...]]) -> None:
    """The backend's outputs against torch's in the same dtype and in float64, over some draws."""
    plain = getattr(reference, piece)
    columns: list[list[tuple[Any, Any, Any]]] = []
    for given in sets:
        found = zip(run(*given), plain(*given), plain(*wide(given)), strict=True)
        for i, (a, t, o) in enumerate(found):
            assert (a is None) == (t is None), i
            if i == len(columns):
                columns.append([])
            columns[i].append((a, t, o))
            assert a is None or a.dtype is t.dtype
    for i, column in enumerate(columns):
        if column[0][0] is not None:
            ours, theirs, oracle = (torch.stack(ts) for ts in zip(*column, strict=True))
            verdict = judge(f"{piece}[{i}]", ours, theirs, oracle)
            assert verdict.passed, str(verdict)


def cases() -> list[tuple[tuple[int, ...], str, str, bool, bool]]:
    """Every activation with two orders; sizes, biases and down projection in turns."""
    found = []
    for i, activation in enumerate(ACTIVATIONS):
        for j in range(2):
            turn = 2 * i + 3 * j
            sizes, order = SIZES[turn % len(SIZES)], ORDERS[(i + 2 * j) % len(ORDERS)]
            found.append((sizes, activation, order, turn % 3 != 0, turn % 4 != 3))
    return found


@compares
@pytest.mark.parametrize("name", ["elementwise", "triton"])
@pytest.mark.parametrize(("sizes", "activation", "order", "down", "bias"), cases())
def test_forward(
    sizes: tuple[int, ...], activation: str, order: str, down: bool, bias: bool, name: str
) -> None:
    run = backend.forward if name == "triton" else backend.elementwise_forward
    for dtype in NARROW if name == "triton" else DTYPES:
        sets = [drawn(sizes, dtype, order, down, bias, seed)[:3] for seed in draws_of(sizes)]
        for save_pre in (True, False):
            check(run, "forward", [(*given, activation, order, save_pre) for given in sets])


@compares
@pytest.mark.parametrize("name", ["elementwise", "triton"])
@pytest.mark.parametrize(("sizes", "activation", "order", "down", "bias"), cases())
def test_backward(
    sizes: tuple[int, ...], activation: str, order: str, down: bool, bias: bool, name: str
) -> None:
    run = backend.backward if name == "triton" else backend.elementwise_backward
    for dtype in NARROW if name == "triton" else DTYPES:
        sets = []
        for seed in draws_of(sizes):
            *given, dy = drawn(sizes, dtype, order, down, bias, seed)
            sets.append((dy, reference.pre_activations(*given), *given, activation, order))
        held = [t is not None for t in (*given[1], *given[2])]
        kept = dy.clone()
        for needs in ((True, *held), (True, *[False] * 6), (False, False, False, *held[2:])):
            check(run, "backward", [(*s, needs) for s in sets])
            assert torch.equal(dy, kept)


@compares
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["elementwise", "triton"])
def test_over_what_was_kept(name: str, order: str) -> None:
    """The same bits where results take the memory of what they are made of; which they do."""
    forward = backend.forward if name == "triton" else backend.elementwise_forward
    run = backend.backward if name == "triton" else backend.elementwise_backward
    for sizes, down in itertools.product(SIZES[1:], (True, False)):
        *given, dy = drawn(sizes, torch.float16, order, down, True)
        names = "gelu_tanh", order
        y, *pre = forward(*given, *names, True)
        assert torch.equal(forward(*given, *names, False)[0], y)
        needs = (True, *(t is not None for t in (*given[1], *given[2])))
        plain = run(dy, pre, *given, *names, needs)
        again = run(dy, None, *given, *names, needs)
        kept = [t if t is None else t.clone() for t in pre]
        over = run(dy, pre, *given, *names, needs, True)
        for a, b, c in zip(plain, over, again, strict=True):
            assert (a is None) == (b is None) == (c is None)
            assert a is None or torch.equal(a, b)
            if a is not None and name == "elementwise":  # which forms them by the same product
                assert torch.equal(a, c)
        assert not torch.equal(pre[0], kept[0])


@compares
@pytest.mark.parametrize("name", ["elementwise", "triton"])
def test_any_strides(name: str) -> None:
    forward = backend.forward if name == "triton" else backend.elementwise_forward
    backward = backend.backward if name == "triton" else backend.elementwise_backward
    x, weights, biases, dy = drawn((40, 24, 36, 20), torch.float16, "apart", True, True)
    turned = Weights(*(w.t().contiguous().t() for w in weights))
    mixed = turned._replace(gate=weights.gate)
    for w in (turned, mixed):
        for view in (x.t().contiguous().t(), torch.cat([x, x], 1)[:, ::2], x[:1].expand(40, 24)):
            given = (view, w, biases, "silu", "apart")
            check(forward, "forward", [(*given, True)])
            pre = reference.pre_activations(view, w, biases)
            check(backward, "backward", [(dy, pre, *given, (True,) * 7)])


@compares
def test_rows_past_the_end_are_not_summed() -> None:
    """Tiles read other rows where they pass the end; bias gradients must not hold them.

    The sigmoid of nothing is not nothing.
    """
    x, weights, biases, dy = drawn((33, 16, 24, 16), torch.float16, "apart", True, True)
    pre = reference.pre_activations(x, weights, biases)
    needs = (*(False,) * 4, True, True, False)
    given = (dy, pre, x, weights, biases, "sigmoid", "apart", needs)
    check(backend.backward, "backward", [given])
