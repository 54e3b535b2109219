"""The CUDA C++ of ``rows_cuda`` run on a CPU, thread by thread: its launches, tiles, rings, turns.

What cannot be seen so is whether the instructions do what ``emulated_hopper.h`` says they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.core.compare import judge
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.cuda import operands, rows, rows_backend, rows_plans
from fastlinear.families.mlp.cuda.rows import Rows, Shares
from tests.kernels.emulation import emulate


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches run on the CPU."""
    emulate(monkeypatch, rows_backend)
    yield
    for plans in (rows_backend._plans, rows_backend._grads_plans, operands._copies_plans):
        plans.clear()


def check(
    config: Rows | None,
    widths: tuple[int, ...],
    m: int,
    names: tuple[str, str],
    dtype: torch.dtype = torch.bfloat16,
    apart: int = 0,
    needs: Any = None,
) -> None:
    """Results and all gradients against float64, beside PyTorch's own."""
    layers = len(widths) - 1
    draw = torch.Generator().manual_seed(0)

    def values(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=draw) * scale).to(dtype)

    x = values(m, widths[0] + apart)[:, : widths[0]]
    pairs = list(pairwise(widths))
    weights = tuple(values(n, k, scale=(2 / k) ** 0.5) for k, n in pairs)
    biases = tuple(None if i == 1 else values(n, scale=0.5) for i, n in enumerate(widths[1:]))
    dy = values(m, widths[-1])
    needs = needs or (True, (True,) * layers, tuple(b is not None for b in biases))
    exact = x.double(), tuple(w.double() for w in weights)
    wide_biases = tuple(None if b is None else b.double() for b in biases)

    def compare(name: str, ours: Any, theirs: Any, oracle: Any) -> None:
        for i, (a, t, o) in enumerate(zip(ours, theirs, oracle, strict=True)):
            assert (a is None) == (o is None), (name, i)
            if a is not None:
                verdict = judge(f"{name}[{i}]", a, t, o)
                assert verdict.passed, str(verdict)

    y, saved = rows_backend.forward(x, weights, biases, *names, True, config=config)
    theirs = reference.forward(x, weights, biases, *names, True)
    oracle = reference.forward(*exact, wide_biases, *names, True)
    compare("y", [y], theirs[:1], oracle[:1])
    compare("saved", saved, theirs[1], oracle[1])
    plain, nothing = rows_backend.forward(x, weights, biases, *names, False, config=config)
    assert torch.equal(plain, y)
    assert nothing == ()

    kept = theirs[1]
    ours = rows_backend.backward(dy, x, weights, kept, *names, needs, config=config)
    more = *kept, *(torch.zeros_like(t) for t in kept[:-1])  # outputs, which it does not read
    again = rows_backend.backward(dy, x, weights, more, *names, needs, config=config)
    for a, b in zip((ours[0], *ours[1], *ours[2]), (again[0], *again[1], *again[2]), strict=True):
        assert a is b is None or torch.equal(a, b)
    eager = reference.backward(dy, x, weights, kept, *names, needs)
    wide = tuple(t.double() for t in kept)
    truth = reference.backward(dy.double(), *exact, wide, *names, needs)
    for name, *found in zip(("dx", "dW", "db"), ours, eager, truth, strict=True):
        lists = [[f] if name == "dx" else f for f in found]
        compare(name, *lists)


@pytest.mark.parametrize(
    ("config", "widths", "rows_", "names"),
    [
        (None, (63, 128, 100, 4), 200, ("relu", "none")),
        (Rows(2, 4), (63, 256, 256, 4), 300, ("relu", "relu")),
        (Rows(2, 3), (64, 256, 200, 1), 150, ("gelu", "gelu")),
        (Rows(1, 3), (200, 136, 17), 100, ("tanh", "tanh")),
        (Rows(2, 2), (415, 512, 300, 1), 140, ("relu", "none")),
        (Rows(2, 2), (70, 384, 448, 33), 300, ("silu", "sigmoid")),
        (Rows(4, 3), (32, 64, 64, 16), 700, ("relu", "none")),
        (Rows(4, 4), (3, 64, 60, 1), 600, ("gelu_tanh", "none")),
        (Rows(3, 3), (13, 192, 192, 13), 500, ("leaky_relu", "leaky_relu")),
        (Rows(2, 2), (64, 64, 64), 1, ("none", "none")),
        (Rows(2, 2), (10, 20, 30), 70, ("none", "softplus")),
    ],
    ids=str,
)
def test_every_number_of_a_chain(
    config: Rows | None, widths: tuple[int, ...], rows_: int, names: tuple[str, str]
) -> None:
    check(config, widths, rows_, names)


def test_tensors_that_begin_between_16_bytes() -> None:
    """Weights, x, dy and what was kept, at any address; single rows and columns of odd strides."""
    draw = torch.Generator().manual_seed(1)

    def values(*shape: int) -> Tensor:
        flat = torch.randn(shape[0] * shape[1] + 1, generator=draw).bfloat16()
        return flat[1:].view(shape)

    names, needs = ("relu", "relu"), (True, (True, True), (True, True))
    for m, x in ((70, values(70, 32)), (1, values(3, 33)[:1, :32])):
        weights = values(64, 32), values(16, 64)
        biases = values(1, 64)[0], values(1, 16)[0]
        turned = weights[0], torch.randn(64, 1, generator=draw).bfloat16().t()
        for ws, bs in ((weights, biases), (turned, (biases[0], None))):
            given = x, ws, bs
            y, _ = rows_backend.forward(*given, *names, True)
            expected, kept = reference.forward(*given, *names, True)
            assert torch.allclose(y, expected, rtol=2e-2, atol=2e-2)
            moved = tuple(values(*t.shape).copy_(t) for t in kept)
            dy = values(m, ws[-1].shape[0])
            found = rows_backend.backward(dy, x, ws, moved, *names, needs)
            theirs = reference.backward(dy, x, ws, kept, *names, needs)
            for ours, own in zip(found, theirs, strict=True):
                pairs = [(ours, own)] if isinstance(own, Tensor) else zip(ours, own, strict=True)
                for a, b in pairs:
                    assert torch.allclose(a, b, rtol=5e-2, atol=5e-2), (a - b).abs().max()


def test_float16_and_rows_that_lie_apart() -> None:
    check(None, (24, 40, 8), 90, ("silu", "none"), torch.float16, apart=8)
    check(None, (24, 40, 8), 90, ("sigmoid", "none"), torch.float16, apart=3)


def test_rows_that_begin_on_16_bytes_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 29 numbers, say, 32 apart, as layers that take the input again have them."""
    monkeypatch.setattr(operands, "aligned_copy", None)
    check(None, (29, 40, 8), 90, ("relu", "none"), apart=3)
    with pytest.raises(TypeError, match="not callable"):
        check(None, (29, 40, 8), 90, ("relu", "none"))


@pytest.mark.parametrize(
    "needs",
    [
        (False, (True, True, True), (True, False, True)),
        (False, (False, False, True), (False, False, True)),
        (False, (False, True, False), (False, False, False)),
        (True, (False, False, False), (False, False, False)),
        (False, (False, False, False), (True, False, False)),
    ],
    ids=str,
)
@pytest.mark.parametrize("names", [("relu", "none"), ("gelu", "relu"), ("tanh", "gelu")])
def test_only_wanted_gradients(needs: Any, names: tuple[str, str]) -> None:
    check(None, (16, 24, 33, 8), 130, names, needs=needs)


def test_many_rows_are_sliced_for_the_weights() -> None:
    few, many = (rows.shares_for(m, ((256, 256),) * 4, 132) for m in (256, 1 << 16))
    assert {one.slices for one in few} == {1}
    assert min(one.slices for one in many) > 1
    assert sum(one.tiles for one in few) >= sum(one.tiles for one in many)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("slices", [1, 3])
def test_every_way_to_share_gradients_out(
    width: int, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shares(_m: int, shapes: Any, _units: int) -> tuple[Shares, ...]:
        return tuple(Shares(n, k, min(width, rows.blocks_of(k)), slices) for n, k in shapes)

    monkeypatch.setattr(rows_backend, "shares_for", shares)
    check(None, (300, 130, 200, 3), 330, ("relu", "none"))


def test_a_chain_too_wide_is_refused() -> None:
    x, weight = (
        torch.zeros(4, 600, dtype=torch.bfloat16),
        torch.zeros(600, 600, dtype=torch.bfloat16),
    )
    with pytest.raises(Exception, match="no configuration"):
        rows_backend.forward(x, (weight, weight), (None, None), "relu", "none", False)


def test_parameters_have_the_kernels_sizes() -> None:
    assert rows_plans.ROWS_BYTES % 64 == 0
