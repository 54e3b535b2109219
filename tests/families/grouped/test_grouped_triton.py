"""The Triton backend against a float64 oracle: under Triton's CPU interpreter, and on a GPU.

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
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import judge
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import reference
from fastlinear.families.grouped.triton import config as triton_config
from fastlinear.families.grouped.triton.config import BackwardConfig, ProductConfig, Walk
from tests.families.interpreted import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    compares,
    run_interpreted,
    starts_it,
)

if INTERPRETED or ON_GPU:
    from fastlinear.families.grouped.triton import backward as whole
    from fastlinear.families.grouped.triton import copies
    from fastlinear.families.grouped.triton import forward as backend
    from fastlinear.families.grouped.triton import tensors as triton_tensors


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# (B, L, G, K, N): ones, tails on either side of a tile, parts of K, several outputs' tiles
SIZES = (
    (1, 1, 1, 1, 1),
    (1, 7, 3, 20, 33),
    (2, 37, 3, 33, 20),
    (3, 2, 2, 17, 50),
    (1, 40, 2, 100, 100),
    (2, 10, 1, 130, 136),
    (1, 20, 1, 270, 20),
    (2, 37, 3, 130, 1),
    (1, 20, 2, 300, 1),
)
FORMS = ("dense", "sliced", "every other", "expanded", "odd address")


@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Results and workspaces start as NaN, so that what is never written shows."""
    if INTERPRETED or ON_GPU:
        for name in ("empty", "vector", "workspace"):
            made = getattr(triton_tensors, name)
            monkeypatch.setattr(
                triton_tensors, name, lambda *a, made=made: made(*a).fill_(float("nan"))
            )
        backend._plans.clear()
        whole._plans.clear()
    yield
    if INTERPRETED or ON_GPU:
        backend._plans.clear()
        whole._plans.clear()


def drawn(
    sizes: tuple[int, ...], features: int, dtype: torch.dtype, order: str, form: str, seed: int
) -> Tensor:
    """Random tokens (B, L, G, features) in an order of memory, in one of FORMS."""
    generator = torch.Generator().manual_seed(seed * 7919 + sum(sizes) * 31 + features)
    shape = (*sizes[:3], features)
    values = torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
    if form == "dense":
        return layouts.empty(shape, order, values, dtype).copy_(values)
    if form == "odd address":
        memory = layouts.empty(shape, order, values, dtype)
        shifted = torch.zeros(memory.numel() + 1, dtype=dtype, device=DEVICE)[1:]
        return torch.as_strided(shifted, shape, memory.stride(), 1).copy_(values)
    if form == "expanded":
        return values[:, :1].expand(shape)
    extra = 3 if form == "sliced" else features
    wide = layouts.empty((*sizes[:3], features + extra), order, values, dtype)
    view = wide[..., :features] if form == "sliced" else wide[..., ::2]
    return view.copy_(values)


def weight_of(
    sizes: tuple[int, ...], dtype: torch.dtype, bias: bool, turned: bool
) -> tuple[Tensor, Tensor | None]:
    _, _, groups, k, n = sizes
    generator = torch.Generator().manual_seed(k * 13 + n)
    shape = (groups, k, n) if turned else (groups, n, k)
    weight = (torch.randn(shape, generator=generator) / k**0.5).to(dtype).to(DEVICE)
    b = torch.randn(groups, n, generator=generator).to(dtype).to(DEVICE) if bias else None
    return weight.transpose(1, 2) if turned else weight, b


def judged(names: tuple[str, ...], ours: Any, theirs: Any, oracle: Any) -> None:
    for name, a, t, o in zip(names, ours, theirs, oracle, strict=True):
        assert (a is None) == (o is None), name
        if a is None:
            continue
        factor = 8.0 if INTERPRETED and a.dtype is torch.bfloat16 else 2.0  # it truncates
        verdict = judge(name, a.contiguous(), t, o, factor=factor)
        assert verdict.passed, str(verdict)


def wide(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else t.double() for t in tensors)


def check_forward(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    order: str,
    form: str = "dense",
    activation: str = "none",
    bias: bool = True,
    turned: bool = False,
    config: Any = None,
) -> None:
    x = drawn(sizes, sizes[3], dtype, order, form, 1)
    weight, b = weight_of(sizes, dtype, bias, turned)
    save = activation_of(activation).saved == "pre"
    y, pre = backend.forward(x, weight, b, activation, save, order, config=config)
    assert layouts.is_dense(y, order)
    assert (y.shape, y.dtype) == ((*sizes[:3], sizes[4]), dtype)
    rest = (activation, save, order)
    theirs = reference.forward(x, weight, b, *rest)
    judged(("y", "pre"), (y, pre), theirs, reference.forward(*wide(x, weight, b), *rest))
    again = backend.forward(x, weight, b, activation, save, order, config=config)[0]
    assert torch.equal(y, again)


def check_backward(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    order: str,
    form: str = "dense",
    activation: str = "none",
    needs: tuple[bool, bool, bool] = (True, True, True),
    turned: bool = False,
    config: Any = None,
) -> None:
    x = drawn(sizes, sizes[3], dtype, order, form, 1)
    # a sum of equal numbers is exact in PyTorch
    dy = drawn(sizes, sizes[4], dtype, order, "dense" if form == "expanded" else form, 2)
    weight, b = weight_of(sizes, dtype, True, turned)
    kind = activation_of(activation).saved
    y, pre = reference.forward(x, weight, b, activation, kind == "pre", order)
    saved = {"none": None, "output": y, "pre": pre}[kind]
    rest = (activation, needs, order)
    grads = whole.backward(dy, saved, x, weight, *rest, config=config)
    dx, dw, db = grads
    assert dx is None or layouts.is_dense(dx, order)
    assert dw is None or dw.is_contiguous()
    assert db is None or db.is_contiguous()
    theirs = reference.backward(dy, saved, x, weight, *rest)
    judged(
        ("dx", "dW", "db"), grads, theirs, reference.backward(*wide(dy, saved, x, weight), *rest)
    )
    for a, c in zip(grads, whole.backward(dy, saved, x, weight, *rest, config=config), strict=True):
        assert a is None or torch.equal(a, c)


@compares
@pytest.mark.parametrize("order", layouts.ORDERS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes: tuple[int, ...], order: str) -> None:
    for dtype in DTYPES if ON_GPU else DTYPES[:2]:
        check_forward(sizes, dtype, order, activation="relu")
        check_backward(sizes, dtype, order, activation="relu")


@compares
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("order", layouts.ORDERS)
def test_any_strides(order: str, form: str) -> None:
    for sizes in ((2, 20, 2, 33, 20), (3, 5, 1, 130, 10)):
        check_forward(sizes, torch.float32, order, form, turned=True)
        check_backward(sizes, torch.float32, order, form, turned=True)


@compares
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, dtype: torch.dtype) -> None:
    for sizes in ((1, 20, 1, 20, 24), (1, 10, 1, 20, 140)):
        check_forward(sizes, dtype, "tokens", activation=activation, bias=sizes[4] == 24)
        check_backward(sizes, dtype, "tokens", activation=activation)


@compares
@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)]
)
def test_only_what_is_needed(needs: tuple[bool, bool, bool]) -> None:
    for sizes in ((1, 35, 1, 20, 24), (1, 20, 1, 20, 140)):
        for activation in ("none", "gelu"):
            check_backward(sizes, torch.float32, "tokens", activation=activation, needs=needs)


@compares
@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_chunks_of_tokens(tiles: int) -> None:
    """One tile a program, several, and all of them in one; with a tail in a tile and in a chunk."""
    sizes = (1, 75, 1, 20, 24)
    for dtype in (torch.float32, torch.bfloat16):
        config = BackwardConfig(16, 16, 4, 2, tiles)
        check_backward(sizes, dtype, "tokens", activation="relu", config=config)
        check_forward(sizes, dtype, "tokens", config=ProductConfig(16, 32, 0, 4, 2, tiles))
        check_forward(sizes, dtype, "tokens", config=ProductConfig(16, 16, 16, 4, 2))


@compares
@pytest.mark.parametrize("order", ["groups", "channels"])
@pytest.mark.parametrize("programs", [1, 2, 4, 7, 20])
def test_programs_of_several_groups(
    programs: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five groups of five tiles, equal shares for each program: parts of groups, whole ones."""
    monkeypatch.setattr(triton_config, "_SUMS_TILES", 0)
    config = BackwardConfig(16, 16, 4, 2, programs, shared=True)
    check_backward((1, 75, 5, 20, 24), torch.float32, order, activation="relu", config=config)
    shares = Walk.quickest(5, 5, programs, True)
    assert shares.programs * shares.each >= 25
    assert shares.shared == (programs < 20)


def test_walks() -> None:
    """All tiles are taken once, by as many programs of a group as it says."""
    for tiles, groups, programs in itertools.product((1, 2, 7, 64), (1, 3, 100), (1, 4, 132, 528)):
        share = tiles, groups, programs
        for walk in (Walk.apart(*share), *(Walk.quickest(*share, also) for also in (True, False))):
            taken = [
                {at // walk.room for at in range(p * walk.each, (p + 1) * walk.each)}
                for p in range(walk.programs)
            ]
            assert {g for t in taken for g in t if g < groups} == set(range(groups))
            assert walk.programs * walk.each >= walk.room * groups > (walk.programs - 1) * walk.each
            most = max(sum(g in t for t in taken) for g in range(groups))
            assert most <= walk.chunks <= most + 1
            assert walk.room >= tiles
            if not walk.shared:
                assert walk.chunks == most
                assert all(len(t) == 1 for t in taken)
    # on an H200: whole groups where sums cost more than even shares save, and the other way round
    assert Walk.quickest(16, 100, 132, True).chunks == 1
    assert Walk.quickest(64, 100, 132, True).shared
    assert Walk.quickest(64, 100, 132, False).chunks > 1
    assert Walk.quickest(32, 81, 132, False).chunks == 3


@compares
def test_weight_gradient_of_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of large groups, tokens cut into several chunks."""
    monkeypatch.setattr(triton_tensors, "units_of", lambda device: 8)
    check_backward((1, 140, 1, 20, 140), torch.float32, "tokens", activation="silu")
    check_backward((2, 70, 1, 20, 140), torch.float32, "channels", activation="silu")
    (made, *_) = (p for key, p in whole._plans.items() if key[0] == "dw")
    assert made._sums._launch is not None


@compares
@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("sizes", [(1, 300, 2, 20, 20), (2, 270, 1, 20, 140)], ids=str)
def test_derivative_where_tokens_lie_side_by_side(sizes: tuple[int, ...], activation: str) -> None:
    """A launch of its own, in tiles long in tokens, the last of them cut."""
    check_backward(sizes, torch.bfloat16, "channels", activation=activation)
    assert any(key[0] == "dpre" for key in whole._plans)


@compares
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_stay_in_their_group_and_token(bad: float) -> None:
    """Columns behind a group's last are those of the next: none of them may be multiplied."""
    sizes = (1, 20, 3, 20, 24)
    x = drawn(sizes, 20, torch.float32, "tokens", "dense", 1)
    x[0, 7, 1, 3] = bad
    weight, b = weight_of(sizes, torch.float32, True, False)
    y, _ = backend.forward(x, weight, b, "none", False, "tokens")
    expected = torch.zeros(1, 20, 3, dtype=torch.bool, device=DEVICE)
    expected[0, 7, 1] = True
    assert torch.equal(~torch.isfinite(y).all(-1), expected)
    dy = drawn(sizes, 24, torch.float32, "tokens", "dense", 2)
    dx, dw, db = whole.backward(dy, None, x, weight, "none", (True, True, True), "tokens")
    assert dx is not None
    assert dw is not None
    assert db is not None
    assert torch.isfinite(dx).all()
    assert torch.isfinite(db).all()
    wrong = ~torch.isfinite(dw)
    assert wrong[1, :, 3].all()
    assert wrong.sum() == 24


@compares
def test_wide_groups() -> None:
    """The kernel that moves tiles through descriptors, and what it leaves to the others."""
    from fastlinear.families.grouped.triton import wide as triton_wide

    triton_wide._plans.clear()
    dtypes = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
    cases = [((1, 130, 2, 128, 256), "gelu"), ((1, 70, 3, 192, 128), "relu")]
    for (sizes, activation), dtype in itertools.product(cases, dtypes):
        x = drawn(sizes, sizes[3], dtype, "tokens", "dense", 1)
        weight, b = weight_of(sizes, dtype, True, False)
        save = activation_of(activation).saved == "pre"
        rest = (activation, save, "tokens")
        assert triton_wide.serves(x, weight, "tokens")
        for bias in (b, None):
            found = triton_wide.forward(x, weight, bias, *rest)
            theirs = reference.forward(x, weight, bias, *rest)
            judged(("y", "pre"), found, theirs, reference.forward(*wide(x, weight, bias), *rest))
    other = drawn((2, 20, 2, 128, 256), 128, torch.float16, "channels", "dense", 1)
    weight, b = weight_of((2, 20, 2, 128, 256), torch.float16, True, False)
    assert not triton_wide.serves(other, weight, "channels")
    y, _ = triton_wide.forward(other, weight, b, "relu", False, "channels")
    assert layouts.is_dense(y, "channels")
    triton_wide._plans.clear()


@compares
def test_nothing_to_do() -> None:
    weight = torch.randn(2, 3, 4, device=DEVICE)
    x = torch.randn(1, 0, 2, 4, device=DEVICE)
    y, _ = backend.forward(x, weight, None, "relu", False, "tokens")
    assert y.shape == (1, 0, 2, 3)
    grads = whole.backward(y, y, x, weight, "relu", (True, True, True), "tokens")
    assert [None if g is None else tuple(g.shape) for g in grads] == [
        (1, 0, 2, 4),
        (2, 3, 4),
        (2, 3),
    ]
    assert grads[1] is not None
    assert not grads[1].any()


@compares
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (2, 37, 3, 33, 48), (5, 3, 2, 300, 304)])
@pytest.mark.parametrize("orders", list(itertools.product(layouts.ORDERS, layouts.ORDERS)))
def test_tokens_are_copied_with_zeros_behind(
    orders: tuple[str, str], sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    batch, length, groups, d, e = sizes
    like = torch.empty(0, dtype=dtype, device=DEVICE)
    for step in (1, 2):
        t = layouts.empty((batch, length, groups, d * step), orders[0], like, dtype)[..., ::step]
        t.copy_(torch.randn(t.shape))
        out = layouts.empty((batch, length, groups, e), orders[1], like, dtype).fill_(float("nan"))
        copies.copy_tokens(t, out)
        assert torch.equal(out[..., :d], t)
        assert not out[..., d:].any()
