"""Triton kernels for few rows of x: the forward by multiply-adds, and the backward in one launch.

Against a float64 oracle, under Triton's CPU interpreter (in a process of its own, started by
``test_under_the_interpreter``) and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import NAMES
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import Verdict, judge, relative_error
from fastlinear.families.linear import reference
from fastlinear.families.linear.triton.backward_config import BLOCKS, Config, config_for
from fastlinear.families.linear.triton.config import (
    BackwardConfig,
    FewRowsConfig,
    TilesConfig,
    few_rows_config_for,
)
from tests.families.interpreted import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    compares,
    gpu,
    run_interpreted,
    starts_it,
)

if INTERPRETED or ON_GPU:
    from fastlinear.families.linear.triton import backend as products
    from fastlinear.families.linear.triton import backward as backend

pytestmark = pytest.mark.usefixtures("poisoned_triton")
ALL = (True, True, True)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = FewRowsConfig(4, 32, 4)
FMA = BackwardConfig("fma", 16, 16, stages=1)
DOT = BackwardConfig("dot", 32, 32, 32, 32)
TILES = TilesConfig(16, 32, 16, 32, 16, 32)


@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


def draw(M: int, K: int, N: int, dtype: torch.dtype, layout: str) -> list[Tensor]:
    """x (M, K), weight (N, K), bias (N,), dy (M, N), in the named layout."""
    generator = torch.Generator().manual_seed(M * 10007 + K * 101 + N)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)

    x, weight, dy = normal(M, K), normal(N, K) / K**0.5, normal(M, N)
    if layout == "transposed weight":
        weight = weight.t().contiguous().t()
    elif layout == "every stride":
        x = normal(3 * K, 2 * M).t()[::2, ::3]
        weight = normal(2 * N, 2 * K)[::2, :K] / K**0.5
        dy = normal(1, N).expand(M, N)
    return [x, weight, normal(N), dy]


def double(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.double()


def verdicts(
    M: int,
    K: int,
    N: int,
    dtype: torch.dtype,
    activation: str,
    *,
    layout: str = "plain",
    rows: FewRowsConfig | None = None,
    config: Config | None = None,
    needs: tuple[bool, bool, bool] = ALL,
) -> list[Verdict]:
    """The forward where ``rows`` is given, and every gradient wanted, judged by the 2x rule."""
    x, w, b, dy = draw(M, K, N, dtype, layout)
    exact = reference.forward(double(x), double(w), double(b), activation, True)
    same = reference.forward(x, w, b, activation, True)
    found: list[Any] = []
    if rows is not None:
        y, pre = products.forward(x, w, b, activation, True, config=rows)
        found += [("y", y, same[0], exact[0]), ("pre", pre, same[1], exact[1])]
    kind = activation_of(activation).saved
    saved = {"none": None, "output": same[0], "pre": same[1]}[kind]
    ours = backend.backward(dy, saved, x, w, activation, needs, config=config)
    theirs = reference.backward(dy, saved, x, w, activation, needs)
    oracle = reference.backward(dy.double(), double(saved), double(x), double(w), activation, needs)
    for name, wanted, *three in zip(("dx", "dW", "db"), needs, ours, theirs, oracle, strict=True):
        assert all((t is not None) == wanted for t in three), name
        if wanted:
            assert three[0].dtype is dtype, name
            found.append((name, *three))
    return [judge(*item) for item in found]


def check(*args: Any, **options: Any) -> None:
    failed = [str(v) for v in verdicts(*args, **options) if not v.passed]
    assert not failed, "; ".join(failed)


@compares
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", NAMES)
def test_every_activation_and_dtype(activation: str, dtype: torch.dtype) -> None:
    check(3, 40, 24, dtype, activation, rows=ROWS, config=FMA)
    check(33, 40, 24, dtype, activation, config=DOT)
    check(33, 40, 24, dtype, activation, config=TILES)


@compares
@pytest.mark.parametrize(("M", "K", "N"), [(1, 1, 1), (1, 33, 7), (2, 65, 33), (4, 100, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_sizes(M: int, K: int, N: int, dtype: torch.dtype) -> None:
    # relu: a handful of numbers says little about the error of a transcendental function
    check(M, K, N, dtype, "relu", rows=ROWS, config=FMA)
    check(M * 16 + 1, K, N, dtype, "relu", config=DOT)
    check(M * 16 + 3, K, N, dtype, "relu", config=TILES)


@compares
@pytest.mark.parametrize("layout", ["plain", "transposed weight", "every stride"])
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts_and_slices(slices: int, layout: str, dtype: torch.dtype) -> None:
    rows = None if layout == "transposed weight" else ROWS
    check(2, 65, 72, dtype, "silu", layout=layout, rows=rows, config=replace(FMA, slices=slices))
    check(20, 65, 72, dtype, "silu", layout=layout, config=replace(DOT, slices=slices))


@compares
@pytest.mark.parametrize("layout", ["plain", "transposed weight", "every stride"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts_of_tiles(layout: str, dtype: torch.dtype) -> None:
    for first in (False, True):
        check(70, 65, 48, dtype, "silu", layout=layout, config=replace(TILES, dpre_first=first))


@compares
@pytest.mark.parametrize("config", [FMA, DOT, replace(DOT, slices=2), TILES], ids=str)
@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_only_what_is_needed(needs: tuple[bool, bool, bool], config: Config) -> None:
    check(4, 40, 70, torch.float32, "relu", config=config, needs=needs)
    if not needs[1]:  # then x is not kept
        _, w, _, dy = draw(4, 40, 70, torch.float32, "plain")
        dx, dw, _ = backend.backward(dy, None, None, w, "none", needs, config=config)
        assert dw is None
        assert (dx is not None) == needs[0]


@compares
def test_db_alone_where_dpre_comes_first() -> None:
    x, w, _, dy = draw(33, 40, 24, torch.float32, "plain")
    saved = x @ w.t()
    config = replace(TILES, dpre_first=True)
    needs = (False, False, True)
    dx, dw, db = backend.backward(dy, saved, x, w, "gelu", needs, config=config)
    assert dx is dw is None
    theirs = reference.backward(dy, saved, x, w, "gelu", needs)[2]
    torch.testing.assert_close(db, theirs)
    backend._plans.clear()
    backend.backward(dy, saved, x, w, "gelu", needs, config=config)
    assert not backend._plans  # no launch of an empty grid


@compares
@pytest.mark.parametrize("M", [1, 4])
def test_a_deep_forward_keeps_its_digits(M: int) -> None:
    """Of 65,536 numbers; with 256 or 128 additions of a thread in a row it was 2.7e-7 to 4.0e-7."""
    x, w, _, _ = draw(M, 1 << 16, 32, torch.float32, "plain")
    y, _ = products.forward(x, w, None, "none", False)
    assert relative_error(y, x.double() @ w.double().t()) < 2e-7


@compares
@pytest.mark.parametrize(("M", "N"), [(8192, 32), (33, 8192)])
def test_deep_sums_of_tiles_keep_their_digits(M: int, N: int) -> None:
    """Of 8192 rows or outputs; by additions of 16 numbers at a time in a row it was 4e-7."""
    x, w, _, dy = draw(M, 32, N, torch.float32, "plain")
    needs = N > M, M > N, M > N
    ours = backend.backward(dy, None, x, w, "none", needs, config=TILES)
    exact = reference.backward(*map(double, (dy, None, x, w)), "none", needs)
    for one, oracle in zip(ours, exact, strict=True):
        assert one is None or relative_error(one, oracle) < 3e-7


@compares
def test_nothing_to_sum() -> None:
    w = torch.ones(3, 4, device=DEVICE)
    x, dy = torch.ones(0, 4, device=DEVICE), torch.ones(0, 3, device=DEVICE)
    dx, dw, db = backend.backward(dy, None, x, w, "none", ALL)
    torch.testing.assert_close(dx, torch.zeros(0, 4, device=DEVICE))
    torch.testing.assert_close(dw, torch.zeros_like(w))
    torch.testing.assert_close(db, torch.zeros(3, device=DEVICE))


@compares
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_call_has_tiles(dtype: torch.dtype, activation: str) -> None:
    for M, K, N in ((129, 64, 48), (1000, 7, 1000), (4096, 4096, 4096)):
        for wide in ((True, True), (True, False), (False, False)):
            assert isinstance(config_for(M, K, N, dtype, activation, wide), TilesConfig)
    check(129, 64, 48, dtype, activation)


# ---------------------------------------------------------------------------------------------
# Tests of the tests: each fault must be seen by the comparison above


def gives(**changes: Any) -> Callable[..., tuple[Any, ...]]:
    """Replace values of a kernel's arguments: ``was=is`` by position ``_<i>``."""

    def change(rest: tuple[Any, ...]) -> tuple[Any, ...]:
        new = list(rest)
        for name, value in changes.items():
            i = int(name[1:])
            new[i] = value(new[i])
        return tuple(new)

    return change


def less(value: int) -> int:
    return value - 1


FAULTS: dict[str, tuple[str, dict[str, Any], Any, set[str]]] = {
    "forward columns": ("_few_rows_forward_kernel", {"rows": ROWS}, gives(_0=less), {"y", "pre"}),
    "forward depth": ("_few_rows_forward_kernel", {"rows": ROWS}, gives(_1=less), {"y", "pre"}),
    "few rows: N": ("_few_rows_backward_kernel", {"config": FMA}, gives(_0=less), {"dx", "db"}),
    "few rows: K": ("_few_rows_backward_kernel", {"config": FMA}, gives(_1=less), {"dx", "dW"}),
    "few rows: a row": ("_few_rows_backward_kernel", {"config": FMA}, gives(_10=less), {"dW"}),
    "rows": ("_backward_kernel", {"config": DOT}, gives(_0=less), {"dx", "dW", "db"}),
    "N": ("_backward_kernel", {"config": DOT}, gives(_1=less), {"dx", "dW", "db"}),
    "slices": ("_sum_slices_kernel", {"config": replace(DOT, slices=2)}, gives(_3=less), {"dx"}),
    "tiles: rows": (
        "_tiles_backward_kernel",
        {"config": TILES},
        gives(_0=less),
        {"dx", "dW", "db"},
    ),
    "tiles: N": ("_tiles_backward_kernel", {"config": TILES}, gives(_1=less), {"dx", "dW", "db"}),
    "tiles: K": ("_tiles_backward_kernel", {"config": TILES}, gives(_2=less), {"dx", "dW"}),
    "tiles: a tile of dx": ("_tiles_backward_kernel", {"config": TILES}, gives(_10=less), {"dx"}),
    "tiles: a tile of dW": ("_tiles_backward_kernel", {"config": TILES}, gives(_11=less), {"dW"}),
    "derivative": (
        "_backward_kernel",
        {"config": DOT},
        lambda rest: tuple("gelu_tanh" if v == "gelu" else v for v in rest),
        {"dx", "dW", "db"},
    ),
}


@compares
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, options, change, broken = FAULTS[fault]
    check(4, 33, 65, torch.float32, "gelu", **options)
    products._plans.clear()
    backend._plans.clear()
    launch = products.Launch

    def faulty(target: Any, grid: Any, rest: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(target, "fn", target).__name__
        return launch(target, grid, change(rest) if name == kernel else rest, *args, **kwargs)

    monkeypatch.setattr(products, "Launch", faulty)
    monkeypatch.setattr(backend, "Launch", faulty)
    failed = {v.name for v in verdicts(4, 33, 65, torch.float32, "gelu", **options) if not v.passed}
    assert broken <= failed


# ---------------------------------------------------------------------------------------------
# On a device only


class TestOnDevice:
    pytestmark = gpu

    @pytest.mark.parametrize("M", [1, 2, 3, 4, 8, 16, 31, 32, 64, 100, 128, 129, 512, 1000])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_chosen_configurations(self, dtype: torch.dtype, M: int) -> None:
        rows = few_rows_config_for(M, 1032, 1544, dtype)
        for activation in ("none", "gelu", "tanh"):
            check(M, 1032, 1544, dtype, activation, rows=rows)

    @pytest.mark.parametrize(
        ("M", "K", "N"), [(64, 256, 256), (512, 256, 256), (512, 512, 512), (520, 128, 2048)]
    )
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_chosen_tiles(self, dtype: torch.dtype, M: int, K: int, N: int) -> None:
        for activation in NAMES:
            check(M, K, N, dtype, activation)
        check(M, K, N, dtype, "relu", layout="transposed weight")
        check(M, K, N, dtype, "relu", layout="every stride")

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_tile_configuration(self, dtype: torch.dtype) -> None:
        for config in BLOCKS[dtype.itemsize]:
            if isinstance(config, TilesConfig):
                check(520, 208, 272, dtype, "relu", config=config)
                check(37, 208, 272, dtype, "none", config=config)

    @pytest.mark.parametrize("M", [1, 64, 512])
    def test_graph_capture_and_determinism(self, M: int) -> None:
        x, w, _, dy = draw(M, 1024, 2048, torch.bfloat16, "plain")
        in_slices = config_for(64, 1024, 2048, torch.bfloat16, "silu")
        assert isinstance(in_slices, BackwardConfig)
        assert in_slices.slices > 1
        first = backend.backward(dy, dy, x, w, "silu", ALL)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = backend.backward(dy, dy, x, w, "silu", ALL)
        for t in captured:
            t.fill_(float("nan"))
        graph.replay()
        for one, other in zip(first, captured, strict=True):
            assert torch.equal(one, other)
