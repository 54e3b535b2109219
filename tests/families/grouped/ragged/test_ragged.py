"""ragged_linear: rows sorted by group, whose numbers are known to the device only.

The Triton backend runs on a GPU, or under Triton's CPU interpreter in a process of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.core.compare import judge
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.dispatch.select import Choice
from fastlinear.families.grouped.ragged import backends, products, spec
from fastlinear.families.grouped.ragged.spec import FRONT
from fastlinear.op.front import no_table
from tests.families.interpreted import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    compares,
    run_interpreted,
    starts_it,
)

NAMES = ("y", "dx", "dW", "db")


@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take the Triton backend on any device; its results start as NaN."""
    from fastlinear.families.grouped.ragged.triton import backend as triton
    from fastlinear.families.grouped.triton import tensors

    made = tensors.vector
    monkeypatch.setattr(tensors, "vector", lambda *a: made(*a).fill_(float("nan")))
    (backend,) = [b for b in backends.FAMILY.candidates("forward") if b.name == "triton"]
    p = backends.problem("forward", 1, 1, 1, 1, dtype="float32", device=DEVICE)
    forced = (Choice(p, backend, "forced", "", ()),)
    monkeypatch.setattr(spec, "choices", lambda *_: forced)
    monkeypatch.setattr(FRONT, "table", no_table)
    monkeypatch.setattr(FRONT, "plans", {})
    monkeypatch.setattr(FRONT, "_admit", lambda *_: None)
    triton._plans.clear()


def drawn(
    rows: int, sizes: list[int], k: int, n: int, dtype: torch.dtype, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(rows + 7 * k + n)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, w = values(rows, k).to(dtype), (values(len(sizes), n, k) / k**0.5).to(dtype)
    b = values(len(sizes), n).to(dtype) if bias else None
    made = [t if t is None else t.to(DEVICE).requires_grad_() for t in (x, w, b)]
    return made[0], made[1], torch.tensor(sizes, device=DEVICE), made[2]  # type: ignore[return-value]


def results(run: Any, x: Tensor, w: Tensor, sizes: Tensor, b: Tensor | None, act: str) -> Any:
    y = run(x, w, sizes, b, act)
    dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y)
    return y, *torch.autograd.grad(y, [t for t in (x, w, b) if t is not None], dy)


def by_rows(x: Tensor, w: Tensor, sizes: Tensor, b: Tensor | None, act: str) -> Tensor:
    """The loop, for sizes as the kernels read them."""
    left, kept = x.shape[0], []
    for size in sizes.tolist():
        kept.append(max(0, min(size, left)))
        left -= kept[-1]
    return products.loop(x, w, torch.tensor(kept), b, act)


def check(rows: int, sizes: list[int], k: int, n: int, dtype: torch.dtype, act: str) -> None:
    given = drawn(rows, sizes, k, n, dtype, bias=act != "silu")
    wide = tuple(
        t.detach().double().requires_grad_() if t is not None and t.is_floating_point() else t
        for t in given
    )

    def ours(x: Tensor, w: Tensor, sizes: Tensor, b: Tensor | None, act: str) -> Tensor:
        return fl.ragged_linear(x, w, sizes, b, activation=act)

    found = results(ours, *given, act)
    theirs, oracle = results(by_rows, *given, act), results(by_rows, *wide, act)
    for name, a, t, o in zip(NAMES, found, theirs, oracle, strict=False):
        factor = 8.0 if INTERPRETED and dtype is torch.bfloat16 else 2.0  # it truncates
        verdict = judge(name, a, t, o, factor=factor)
        assert verdict.passed, str(verdict)
    for g, size in enumerate(sizes):
        if size <= 0:
            assert not found[2][g].any()
            if given[3] is not None:
                assert not found[3][g].any()
    owned = min(rows, sum(max(0, s) for s in sizes))
    assert not found[0][owned:].any()
    assert not found[1][owned:].any()
    again = results(ours, *given, act)
    assert all(torch.equal(a, c) for a, c in zip(found, again, strict=True))


@compares
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (40, [3, 0, 20, 17]),
        (40, [0, 0, 0]),
        (40, [40]),
        (37, [5, 9]),
        (20, [30, 4, 4]),  # passes the last row
        (20, [4, -7, 2**62, -(2**62), 5]),
        (20, [5, 2**62, 2**62, 2**62, 3]),  # their sum passes 64 bits
        (1, [0, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_kernels(rows: int, sizes: list[int], kernels: None) -> None:
    for k, n, dtype in ((20, 33, torch.float32), (70, 16, torch.bfloat16)):
        check(rows, sizes, k, n, dtype, "tanh")


@compares
@pytest.mark.parametrize("at_once", [1, 4])
def test_sizes_are_looked_at_some_at_a_time(
    at_once: int, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastlinear.families.grouped.ragged.triton import backend as triton

    monkeypatch.setattr(triton, "_MOST_SIZES", at_once)
    for rows, sizes in ((40, [3, 0, 20, 2, 0, 0, 7]), (20, [4, -7, 2**62, 3, 5])):
        triton._plans.clear()
        check(rows, sizes, 20, 33, torch.float32, "tanh")


@compares
def test_more_groups_than_a_program_looks_at_together(
    kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of them without rows."""
    from fastlinear.families.grouped.ragged.triton import backend as triton

    if INTERPRETED:  # every group is a program more
        monkeypatch.setattr(triton, "_MOST_SIZES", 64)
    groups = triton._MOST_SIZES + 60
    sizes = [0] * groups
    for g in (0, 3, groups // 2 + 7, triton._MOST_SIZES - 1, triton._MOST_SIZES, groups - 1):
        sizes[g] = 5
    assert triton._blocks(groups) == (triton._MOST_SIZES, 2)
    x, w, numbers, b = drawn(33, sizes, 8, 8, torch.float32)
    with torch.no_grad():
        y = fl.ragged_linear(x, w, numbers, b, activation="tanh")
        torch.testing.assert_close(y, products.loop(x, w, numbers, b, "tanh"))


@compares
@pytest.mark.parametrize("tma", [False, True], ids=["loads", "descriptors"])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_whole_tiles_in_any_number(
    activation: str, tma: bool, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tiles of rows and columns, by loads without masks and by descriptors."""
    from fastlinear.families.grouped.ragged.triton import backend as triton

    size = 64 if ON_GPU else 16
    for high, dtype in ((1, torch.float16), (2, torch.bfloat16), (8, torch.float16)):
        config = triton.Config(size, size, size, 4, 3, high, tma)
        for name in ("product_config", "weight_config"):
            monkeypatch.setattr(triton, name, lambda *_, c=config: c)
        triton._plans.clear()
        check(
            5 * size + 3,
            [2 * size + 1, 0, size, 2, size + 5],
            2 * size,
            3 * size,
            dtype,
            activation,
        )
        described = [launch.described for launch in triton._plans.values()]
        assert described == [tma] * 3
        check(3 * size, [size + 4, 3], 2 * size + 8, size - 8, dtype, activation)


@compares
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy: that is the point
@pytest.mark.parametrize("tma", [False, True], ids=["loads", "descriptors"])
def test_what_is_not_finite_stays_in_its_group(
    tma: bool, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles reach into the rows of the next group."""
    from fastlinear.families.grouped.ragged.triton import backend as triton

    config = triton.Config(16, 16, 16, 4, 3, 8, tma)
    for name in ("product_config", "weight_config"):
        monkeypatch.setattr(triton, name, lambda *_: config)
    triton._plans.clear()
    for broken in range(2):  # x, dy
        x, w, sizes, b = drawn(45, [21, 24], 32, 32, torch.float16)
        dy = torch.ones(45, 32, device=DEVICE, dtype=torch.float16)
        with torch.no_grad():
            (x, dy)[broken][21:] = float("inf")
        y = fl.ragged_linear(x, w, sizes, b)
        dx, dw, db = torch.autograd.grad(y, [x, w, b], dy)  # type: ignore[list-item]
        for t in (y[:21], dx[:21], dw[0], db[0]):
            assert t.isfinite().all()
        assert not dw[1].isfinite().any()


@compares
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kernels_know_all_activations(activation: str, kernels: None) -> None:
    check(30, [7, 0, 12], 24, 10, torch.float32, activation)


@compares
def test_kernels_take_any_strides(kernels: None) -> None:
    x = torch.randn(12, 40, device=DEVICE)[:, 1::2]
    w = torch.randn(2, 20, 8, device=DEVICE).transpose(1, 2)
    sizes = torch.tensor([0, 5, 9, 7], dtype=torch.int32, device=DEVICE)[1::2]
    found = fl.ragged_linear(x, w, sizes, activation="relu")
    expected = products.loop(x, w, sizes, None, "relu")
    torch.testing.assert_close(found, expected)


@compares
def test_kernels_with_a_graph_of_the_gradients(kernels: None) -> None:
    x, w, sizes, b = drawn(12, [5, 3], 4, 6, torch.float32)

    def second(run: Any) -> Any:
        y = run(x, w, sizes, b, "tanh")
        (dx,) = torch.autograd.grad(y.square().sum(), [x], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [x, w, b])

    ours = second(lambda x, w, s, b, a: fl.ragged_linear(x, w, s, b, activation=a))
    for a, e in zip(ours, second(products.loop), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_step_waits_for_nothing_and_is_three_launches() -> None:
    from benchmarks.harness.kernels import kernels_of

    x, w, sizes, b = drawn(300, [100, 0, 150], 64, 48, torch.bfloat16)
    dy = torch.randn(300, 48, device=DEVICE, dtype=torch.bfloat16)

    def step() -> Any:
        y = fl.ragged_linear(x, w, sizes, b, activation="silu")
        return torch.autograd.grad(y, [x, w, b], dy)  # type: ignore[list-item]

    names = kernels_of(step, torch.device("cuda"))
    assert len(names) == 3, names
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(INTERPRETED, reason="is PyTorch's")
@pytest.mark.parametrize("sizes", [[10, -5, 9, 40], [0, 0, 0], [7, 0, 3, 11], [37]])
def test_pytorchs_grouped_product_for_weights(sizes: list[int]) -> None:
    """Negative sizes count as 0, what passes the rows is cut off, other weights are zeros."""
    triton = pytest.importorskip("fastlinear.families.grouped.ragged.triton.backend")
    dy, x = (torch.randn(37, n, device=DEVICE).bfloat16() for n in (24, 16))
    found = triton._by_pytorch(dy, x, torch.tensor(sizes, device=DEVICE))
    at = 0
    for dw, size in zip(found, sizes, strict=True):
        end = min(37, at + max(0, size))
        expected = (dy[at:end].double().t() @ x[at:end].double()).to(dw)
        torch.testing.assert_close(dw, expected, atol=0.05, rtol=0.01)
        assert end > at or not dw.any()
        at = end


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("bias", [True, False])
def test_large_weights(bias: bool) -> None:
    """Their gradient is PyTorch's grouped product; all else is as ever, also when calls recur."""
    from fastlinear.families.grouped.ragged.triton import backend as triton

    x, w, sizes, b = drawn(512, [300, 0, 180], 4096, 4096, torch.bfloat16, bias)
    pays = triton.pytorch_pays(torch.empty_like(x), None, x)
    assert pays == (torch.cuda.get_device_capability()[0] == 9)
    torch.full((1 << 26,), float("nan"), device=DEVICE)  # what new memory holds

    def run(*given: Any) -> Any:
        return fl.ragged_linear(*given[:4], activation=given[4])

    found = results(run, x, w, sizes, b, "none")
    for _ in range(4):
        again = results(run, x, w, sizes, b, "none")
    assert all(torch.equal(a, e) for a, e in zip(again, found, strict=True))
    assert not found[2][1].any()
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, w, b)]
    theirs = results(products.loop, x, w, sizes, b, "none")
    oracle = results(products.loop, wide[0], wide[1], sizes, wide[2], "none")  # type: ignore[arg-type]
    for name, a, t, o in zip(NAMES, found, theirs, oracle, strict=False):
        verdict = judge(name, a, t, o)
        assert verdict.passed, str(verdict)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_compiles_whole(activation: str) -> None:
    x, w, sizes, b = drawn(12, [5, 0, 3], 4, 6, torch.float32)

    def run(*given: Any) -> Any:
        y = fl.ragged_linear(given[0], given[1], sizes, given[2], activation=activation)
        return y * 2

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, e in zip(
        (compiled(x, w, b), *torch.autograd.grad(compiled(x, w, b).sum(), (x, w, b))),  # type: ignore[arg-type]
        (run(x, w, b), *torch.autograd.grad(run(x, w, b).sum(), (x, w, b))),  # type: ignore[arg-type]
        strict=True,
    ):
        torch.testing.assert_close(a, e)


@pytest.mark.skipif(INTERPRETED, reason="checks registrations")
def test_opcheck() -> None:
    x, w, sizes, b = drawn(12, [5, 0, 3], 4, 6, torch.float32)
    for activation in ("relu", "gelu"):
        call = (x, w, sizes, b, activation, True, "")
        torch.library.opcheck(torch.ops.fastlinear.ragged_linear, call)


def test_loop_is_right_and_zero_behind_the_last_group() -> None:
    x, w, b = torch.randn(7, 3), torch.randn(2, 4, 3), torch.randn(2, 4)
    y = fl.ragged_linear(x, w, torch.tensor([4, 1]), b, activation="sigmoid")
    expected = [torch.sigmoid(x[t] @ w[g].t() + b[g]) for t, g in enumerate([0, 0, 0, 0, 1])]
    torch.testing.assert_close(y[:5], torch.stack(expected))
    assert not y[5:].any()


def test_gradients_of_empty_groups_are_zeros() -> None:
    for sizes in ([0, 2, 0], [0, 0, 0]):
        x, w, counts, b = drawn(3, sizes, 4, 5, torch.float64)
        y = fl.ragged_linear(x, w, counts, b, backend="eager")
        dx, dw, db = torch.autograd.grad(y.sum(), [x, w, b])  # type: ignore[list-item]
        assert not dw[0].any()
        assert not db[2].any()
        assert not dx[sum(sizes) :].any()


def test_gradcheck() -> None:
    x, w, sizes, b = drawn(6, [2, 0, 3], 3, 2, torch.float64)

    def run(*given: Any) -> Tensor:
        return fl.ragged_linear(given[0], given[1], sizes, given[2], activation="gelu")

    if not ON_GPU:
        assert torch.autograd.gradcheck(run, (x, w, b))


@pytest.mark.parametrize("sizes", [[-1, 2], [3, 9]])
def test_bad_sizes_are_named_where_the_host_reads_them(sizes: list[int]) -> None:
    with pytest.raises(InputError, match="group_sizes of at least 0"):
        fl.ragged_linear(
            torch.ones(5, 3), torch.ones(2, 4, 3), torch.tensor(sizes), backend="eager"
        )


def test_the_most_groups_are_one_number() -> None:
    pytest.importorskip("triton")
    from fastlinear.families.grouped.ragged.triton import backend as triton

    assert backends.MAX_GROUPS == triton.MAX_GROUPS


def test_clear_errors() -> None:
    x, w, sizes = torch.ones(5, 3), torch.ones(2, 4, 3), torch.tensor([1, 2])
    bad: list[tuple[str, dict[str, Any]]] = [
        ("weight of shape", {"weight": w[0]}),
        ("x of shape", {"x": x.t()}),
        ("group_sizes of shape", {"group_sizes": sizes[:1]}),
        ("group_sizes of shape", {"group_sizes": sizes.float()}),
        ("bias of shape", {"bias": torch.ones(4)}),
        ("x's dtype", {"weight": w.double()}),
        ("activation in", {"activation": "swish"}),
        ("backend in", {"backend": "fast"}),
        ("group_sizes to be a tensor", {"group_sizes": [1, 2]}),
    ]
    for expected, change in bad:
        with pytest.raises(InputError, match=expected):
            fl.ragged_linear(**({"x": x, "weight": w, "group_sizes": sizes} | change))
    if not ON_GPU:
        with pytest.raises(UnsupportedError, match="CUDA devices only"):
            fl.ragged_linear(x, w, sizes, backend="triton")


@pytest.mark.parametrize("activation", ["none", "sigmoid"])
def test_rows_of_no_group_are_zeros_whatever_they_hold(activation: str) -> None:
    """Also by sigmoid(0 + b), which is no zero; the error of a sum that is too large says so."""
    x, w, _, b = drawn(6, [2, 1], 4, 5, torch.float32)
    sizes = torch.tensor([2, 1], device=DEVICE)
    with torch.no_grad():
        x[3:] = torch.nan
    for backend in (None, "eager"):
        y = fl.ragged_linear(x, w, sizes, b, activation=activation, backend=backend)
        dx, dw, db = torch.autograd.grad(y.sum(), (x, w, b))  # type: ignore[arg-type]
        assert not y[3:].any()
        assert not dx[3:].any()
        assert dw.isfinite().all()
        assert db.isfinite().all()
    with pytest.raises(InputError, match="where they sum to less, the rows behind give zeros"):
        fl.ragged_linear(x, w, sizes + 3, b, backend="eager")
