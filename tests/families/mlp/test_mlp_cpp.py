"""The C++ whole-net kernels and the compiled fast path: every size class, threads, plans,
failures."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.core.compare import judge
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import family
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.cpu import whole
from fastlinear.families.mlp.problem import problem
from fastlinear.fastpath import lookup as compiled
from fastlinear.native import cpp_build

pytestmark = pytest.mark.skipif(
    cpp_build.reason_not() is not None, reason="C++ cannot be compiled here"
)
needs_fastpath = pytest.mark.skipif(
    compiled.reason_not() is not None, reason="no compiled fast path here"
)


def net(m: int, *widths: int) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    weights = tuple(torch.randn(n, k) * (2 / k) ** 0.5 for k, n in pairwise(widths))
    return torch.randn(m, widths[0]), weights, tuple(torch.randn(n) for n in widths[1:])


def verdict(x: Tensor, ws: Any, bs: Any, save: bool = False) -> Any:
    y, saved = whole.forward(x, ws, bs, "relu", "none", save)
    assert len(saved) == (len(ws) if save else 0)
    wide = [tuple(t.double() for t in part) for part in (ws, bs)]
    oracle = reference.mlp(x.double(), *wide, "relu", "none")
    return judge("y", y, reference.mlp(x, ws, bs, "relu", "none"), oracle)


# every number of vectors in a block, of rows in a tile, and tails of each
@pytest.mark.parametrize("m", [1, 2, 4, 5, 8, 9, 16, 17, 31, 33, 47, 48, 49, 64, 65, 127, 130])
def test_every_block_shape(m: int) -> None:
    for width in (1, 5, 16, 30, 33):
        assert verdict(*net(m, 70, width, 50)).passed
    assert verdict(*net(m, 31, 64, 2), True).passed


def test_results_share_no_memory() -> None:
    """A registered op's must not: torch will refuse it."""
    x, weights, biases = net(5, 16, 24, 24, 24, 3)
    y, saved = whole.forward(x, weights, biases, "relu", "tanh", True)
    assert saved[-1] is y  # which the op leaves out
    assert len({t.untyped_storage().data_ptr() for t in saved}) == len(weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("names", [("relu", "none"), ("gelu", "tanh"), ("silu", "gelu")])
@pytest.mark.parametrize(
    ("m", "widths"),
    [(1, (16, 16)), (5, (70, 33, 2)), (130, (70, 30, 50)), (3001, (200, 72, 5))],
)
def test_numbers_of_16_bits(
    dtype: torch.dtype, names: tuple[str, str], m: int, widths: tuple[int, ...]
) -> None:
    """What the forward gives and keeps, and every gradient; many rows in parts."""
    x, weights, biases = net(m, *widths)
    ws, bs = (tuple(t.to(dtype) for t in some) for some in (weights, (*biases[:-1],)))
    call = x.to(dtype), ws, (*bs, None)

    def double(given: Any) -> Any:
        if isinstance(given, tuple):
            return tuple(map(double, given))
        return given.double() if isinstance(given, Tensor) else given

    def same(ours: Any, theirs: Any, oracle: Any) -> None:
        for a, t, o in zip(*map(flat, (ours, theirs, oracle)), strict=True):
            assert (a is None) == (t is None)
            if a is not None:
                assert a.dtype is dtype
                assert judge("result", a, t, o).passed, judge("result", a, t, o)

    theirs = reference.forward(*call, *names, True)
    same(whole.forward(*call, *names, True), theirs, reference.forward(*double(call), *names, True))
    assert whole.forward(*call, *names, False)[0].equal(whole.forward(*call, *names, True)[0])
    dy = torch.randn(m, widths[-1]).to(dtype)
    for needs in (
        (True, (True,) * len(ws), (*(True,) * len(bs), False)),
        (False, (*(False,) * (len(ws) - 1), True), (False,) * len(ws)),
    ):
        given = dy, call[0], ws, theirs[1]
        rest = *names, needs
        ours = whole.backward(*given, *rest)
        same(ours, reference.backward(*given, *rest), reference.backward(*double(given), *rest))


def flat(given: Any) -> list[Any]:
    return [t for part in given for t in (part if isinstance(part, tuple) else (part,))]


def test_odd_sizes() -> None:
    """Every number of rows up to 70, widths with every remainder of vectors and of dot blocks."""
    for m in range(1, 71):
        k, n = 1 + 2 * (m * 7 % 65), 1 + 2 * (m * 11 % 65)
        assert verdict(*net(m, k, n, 130 - n)).passed, (m, k, n)
        assert verdict(*net(m, n, m, k), True).passed, (m, k, n)
    for n in range(1, 131, 2):
        assert verdict(*net(1 + n % 19, n, 131 - n)).passed, n


@pytest.mark.parametrize("m", [1, 2, 5, 6, 7, 12, 13, 16])
def test_rows_longer_than_one_sum(m: int) -> None:
    """Long dot products are cut in pieces; their ends need not fall on a vector's."""
    for k in (1023, 1024, 1025, 2048, 3101):
        assert verdict(*net(m, k, 21), save=True).passed, k
        assert verdict(*net(m, 18, k, 53)).passed, k


@pytest.mark.parametrize("m", [17, 33, 48, 64, 130])
def test_products_in_parts_of_the_depth(m: int) -> None:
    """Their numbers go by way of the result; bias and activation come with the last part."""
    for k in (1023, 1024, 1025, 2048, 3101):
        assert verdict(*net(m, k, 21), save=True).passed, k
        assert verdict(*net(m, 18, k, 53)).passed, k
        x, ws, bs = net(m, k, 17)
        wide = [tuple(t.double() for t in part) for part in (ws, bs)]
        for name in ("relu", "gelu"):
            y, (pre,) = whole.forward(x, ws, bs, "none", name, True)
            oracle = reference.mlp(x.double(), *wide, "none", name)
            assert judge("y", y, reference.mlp(x, ws, bs, "none", name), oracle).passed
            if name == "gelu":
                plain = torch.nn.functional.linear(x.double(), *(t[0] for t in wide))
                single = torch.nn.functional.linear(x, ws[0], bs[0])
                assert judge("pre", pre, single, plain).passed


@pytest.mark.parametrize("m", [512, 577, 700])
@pytest.mark.parametrize("widths", [(64, 64), (128, 16, 80), (48, 112, 128, 16)])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_many_rows_of_narrow_layers(m: int, widths: tuple[int, ...], activation: str) -> None:
    """Weights are turned instead of activations; blocks and panels with and without a rest."""
    x, ws, bs = net(m, *widths)
    some = (None, *bs[1:])
    wide = [tuple(None if t is None else t.double() for t in part) for part in (ws, some)]
    names = activation, "gelu"
    ours = whole.forward(x, ws, some, *names, True)
    theirs = reference.forward(x, ws, some, *names, True)
    oracle = reference.forward(x.double(), *wide, *names, True)
    results = ([r[0], *r[1]] for r in (ours, theirs, oracle))
    for i, (a, t, o) in enumerate(zip(*results, strict=True)):
        assert judge(f"output {i}", a, t, o).passed, judge(f"output {i}", a, t, o)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y, saved = whole.forward(x, ws, some, *names, threads == 2)
            assert torch.equal(y, ours[0])
            assert all(torch.equal(a, b) for a, b in zip(saved, ours[1], strict=False))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("m", [1, 6, 7, 13, 64, 77])
@pytest.mark.parametrize("widths", [(300, 200, 150), (129, 512, 257, 144), (5, 320, 3)])
def test_gradients_of_wide_layers(m: int, widths: tuple[int, ...]) -> None:
    """Wide enough that panels of weights and of inputs are laid together first."""
    x, ws, bs = net(m, *widths)
    layers = len(ws)
    dy = torch.randn(m, widths[-1])
    needs = (True, (True,) * layers, (True,) * layers)

    def grads(module: Any, wide: bool) -> list[Tensor]:
        kind = torch.float64 if wide else torch.float32
        to = [tuple(t.to(kind) for t in part) for part in (ws, bs)]
        _, saved = module.forward(x.to(kind), *to, "silu", "gelu", True)
        dx, dws, dbs = module.backward(dy.to(kind), x.to(kind), to[0], saved, "silu", "gelu", needs)
        return [dx, *dws, *dbs]

    ours, theirs, oracle = (
        grads(whole, False),
        grads(reference, False),
        grads(reference, True),
    )
    for i, (a, t, o) in enumerate(zip(ours, theirs, oracle, strict=True)):
        assert judge(f"grad {i}", a, t, o).passed, judge(f"grad {i}", a, t, o)


@pytest.mark.parametrize("m", [1, 4, 7, 16, 17, 40, 600])
def test_nan_and_infinity_stay_where_torch_has_them(m: int) -> None:
    x, ws, bs = net(m, *((48, 32, 16) if m == 600 else (37, 45, 19)))
    x[m // 2, -1] = float("nan")
    x[0, 1] = float("inf")
    ws[1][-1, -1] = float("inf")
    bs[0][3] = float("-inf")
    y = whole.forward(x, ws, bs, "relu", "none", False)[0]
    expected = reference.mlp(x, ws, bs, "relu", "none")
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.isinf())
    assert expected.isnan().any()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("m", [1, 3, 8, 16, 33, 40, 64, 96, 200, 777])
def test_threads_change_nothing(m: int, threads: int) -> None:
    """Blocks shared out, features shared out, and one thread: the same bits."""
    for widths in ((300, 280, 290, 300), (240, 250, 230)):
        _threads_change_nothing(threads, *net(m, *widths))


def _threads_change_nothing(threads: int, x: Tensor, ws: Any, bs: Any) -> None:
    m, layers = len(x), len(ws)
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            y, saved = whole.forward(x, ws, bs, "gelu", "tanh", True)
            results.append([y, *saved])
            if m <= 200:
                needs = (True, (True,) * layers, (True,) * layers)
                dx, dws, dbs = whole.backward(y, x, ws, saved, "gelu", "tanh", needs)
                results[-1] += [dx, *dws, *dbs]
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_ten_thousand_calls_agree() -> None:
    for m in (1, 6):
        x, ws, bs = net(m, 24, 24, 24)
        expected = fl.mlp(x, ws, bs)
        assert all(torch.equal(fl.mlp(x, ws, bs), expected) for _ in range(5000))


def test_no_read_or_write_beyond_a_tensor() -> None:
    """NaN all around the tensors never comes in, and stays where it is."""
    for m, k, n in ((1, 7, 5), (3, 17, 33), (6, 7, 5), (33, 19, 1), (70, 3, 30)):
        frames = []

        def framed(*shape: int, frames: list[Any] = frames) -> Tensor:
            count = int(torch.Size(shape).numel())
            frame = torch.full((count + 128,), float("nan"))
            frame[64 : 64 + count] = torch.randn(count)
            frames.append((frame, count))
            return frame[64 : 64 + count].view(shape)

        x, ws, bs = framed(m, k), (framed(n, k), framed(k, n)), (framed(n), framed(k))
        y, saved = whole.forward(x, ws, bs, "silu", "none", True)
        assert torch.isfinite(y).all()
        needs = (True, (True, True), (True, True))
        grads = whole.backward(framed(m, k), x, ws, saved, "silu", "none", needs)
        assert all(torch.isfinite(g).all() for g in (grads[0], *grads[1], *grads[2]))
        for frame, count in frames:
            assert frame[:64].isnan().all()
            assert frame[64 + count :].isnan().all()
            assert frame[64 : 64 + count].isfinite().all()


def test_what_it_refuses() -> None:
    def why(**changes: Any) -> str | None:
        given = {"dtype": "float32", "device": "cpu"} | changes
        widths = given.pop("widths", (8, 8))
        piece, m = given.pop("piece", "forward"), given.pop("m", 4)
        return whole.reason_not(problem(piece, m, widths, **given))

    assert why() is None
    assert "float64" in str(why(dtype="float64"))
    assert why(dtype="bfloat16", widths=(2048, 2048)) is None
    assert "16 bits" in str(why(dtype="bfloat16", widths=(2048, 2049)))
    assert "CPU" in str(why(device="cuda"))
    assert "contiguous" in str(why(w_layout="mixed"))
    assert why(widths=(8, 9000), m=16) is None
    assert "9000" in str(why(widths=(8, 9000), m=17))
    assert "empty" in str(why(m=0))
    assert "rows" in str(why(piece="backward", m=100_000))


@needs_fastpath
def test_a_plan_serves_only_calls_like_its_own() -> None:
    """Whatever fact of a call differs, the plan of another is not taken."""
    cache.forget()
    x, ws, bs = net(3, 16, 16, 16)
    assert compiled.wait(), compiled.reason_not()
    table = compiled.table("mlp")
    assert table is not None
    given = (x, list(ws), list(bs), "relu", "none", None)
    fl.mlp(x, list(ws), list(bs))
    assert table.call(*given) is not None

    def misses(i: int, value: Any) -> bool:
        return table.call(*given[:i], value, *given[i + 1 :]) is None

    assert misses(0, torch.randn(4, 16))
    assert misses(0, torch.randn(16, 3).t())
    assert misses(0, x.double())
    assert misses(0, x.to("meta"))
    assert misses(0, torch._neg_view(x))
    assert misses(0, x.to_sparse())
    assert misses(0, "x")
    assert misses(0, x.clone().requires_grad_())
    assert misses(1, [ws[0]])
    assert misses(1, [ws[0], ws[1].t()])
    assert misses(1, [ws[0], ws[1].to_sparse()])
    assert misses(1, iter(ws))
    assert misses(2, None)
    assert misses(2, [bs[0], None])
    assert misses(2, [bs[0]])
    assert misses(3, "gelu")
    assert misses(4, "relu")
    assert misses(5, "eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert table.call(*given) is None
    with torch.inference_mode():
        assert table.call(*given) is None
    torch.set_float32_matmul_precision("high")
    assert table.call(*given) is None
    torch.set_float32_matmul_precision("highest")
    assert table.call(*given) is not None
    cache.forget()
    assert table.call(*given) is None
    assert table.call(x) is None
    with pytest.raises(TypeError, match="a call and a plan"):
        table.admit(x)
    with pytest.raises(ValueError, match="kind of plan"):
        table.admit(*given, ("unknown",))


@needs_fastpath
def test_tuning_times_what_callers_pay() -> None:
    """Inference outside CUDA graphs goes through mlp with the backend forced, all else directly."""
    p = problem("forward", 2, (16, 16, 16), dtype="float32", device="cpu", precision="highest")
    fam = family("mlp")
    (kernel,) = [b for b in fam.candidates("forward") if b.name == "whole_cpp"]
    assert fam.timed is not None
    way = fam.timed(kernel, p)
    assert way is not None
    inputs = fam.make_inputs(p, torch.device("cpu"), 0)
    with torch.no_grad():
        y = way(*inputs)
        assert compiled.wait()
        table = compiled.table("mlp")
        assert table is not None
        x, ws, bs, *names, _ = inputs
        through = table.call(x, ws, bs, *names, "whole_cpp")
    assert torch.equal(y, through)
    assert torch.equal(y, whole.forward(*inputs)[0])
    for other in (replace(p, needs_grad=True), replace(p, captured=True), p.with_piece("backward")):
        assert fam.timed(kernel, other) is None


@needs_fastpath
def test_the_fast_path_keeps_nothing_alive() -> None:
    assert compiled.wait()
    x, ws, bs = net(3, 16, 16, 16)
    watched = [weakref.ref(t) for t in (x, *ws, *bs)]
    y = fl.mlp(x, ws, bs)
    del x, ws, bs
    gc.collect()
    assert all(w() is None for w in watched)
    assert torch.isfinite(y).all()
    names = [f"re{'lu'}" for _ in range(3)]
    counts = sys.getrefcount(names[0])
    for _ in range(50):
        fl.mlp(*net(2, 8, 8), activation=names[0])
    assert sys.getrefcount(names[0]) <= counts + 60


@needs_fastpath
def test_more_plans_than_are_kept() -> None:
    assert compiled.wait()
    weights, biases = net(1, 4, 4)[1:]
    for m in range(1, 200):
        assert fl.mlp(torch.ones(m, 4), weights, biases).shape == (m, 4)


@needs_fastpath
def test_an_error_inside_a_plan_comes_through() -> None:
    assert compiled.wait(), compiled.reason_not()
    table = compiled.table("mlp")
    assert table is not None
    x, ws, bs = net(3, 16, 16)

    def plan(*_: Any) -> Tensor:
        raise ZeroDivisionError

    given = (x, ws, bs, "none", "none", None)
    assert table.admit(*given, plan)
    with pytest.raises(ZeroDivisionError):
        table.call(*given)
    cache.forget()


@needs_fastpath
def test_exit_with_live_plans() -> None:
    code = (
        "import torch, fastlinear as fl\n"
        "from fastlinear.fastpath import lookup\n"
        "lookup.wait()\n"
        "w = [torch.randn(8, 8, requires_grad=True)]\n"
        "fl.mlp(torch.randn(2, 8), w).sum().backward()\n"
        "with torch.no_grad(): fl.mlp(torch.randn(2, 8), w)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ
    )
    assert (done.returncode, done.stderr) == (0, "")
