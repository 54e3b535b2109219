"""Products by planes against float64: their CUDA C++ run on a CPU, thread by thread, and on a GPU.

What cannot be seen on a CPU is whether the instructions do what ``emulated_hopper.h`` says they do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear
from fastlinear.activations.reference import ACTIVATIONS
from fastlinear.core.compare import judge, relative_error
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.linear import reference
from fastlinear.families.linear.cuda import planes_backend, planes_product, planes_split
from fastlinear.families.linear.cuda.planes import (
    KERNEL,
    STAGES,
    SUMS_KERNEL,
    Config,
    Derivation,
)
from fastlinear.families.linear.cuda.planes_split import Planes, Source
from tests.families.hopper_only import on_hopper
from tests.families.planes_places import PLACES, placed, values
from tests.kernels import emulation

_EMULATED = ("relu", "gelu", "sine", "softplus")


@pytest.fixture(params=PLACES, autouse=True)
def place(request: pytest.FixtureRequest) -> Iterator[None]:
    with placed(request.param):
        yield


def split(matrices: Sequence[Tensor], by_columns: Sequence[bool]) -> list[Planes]:
    return planes_split.split(
        [Source(t, not way, way) for t, way in zip(matrices, by_columns, strict=True)]
    )


def near(ours: Tensor | None, theirs: Tensor, oracle: Tensor) -> None:
    assert ours is not None
    verdict = judge("product", ours, theirs, oracle)
    assert verdict.passed, str(verdict)


def check(x: Tensor, weight: Tensor, dpre: Tensor) -> None:
    """All three products against float64, beside PyTorch's own."""
    for ours, (a, b) in (
        (planes_backend.forward(x, weight, None, "none", False)[0], (x, weight.t())),
        (planes_backend.grad_input(dpre, weight), (dpre, weight)),
        (planes_backend.grad_weight(dpre, x), (dpre.t(), x)),
    ):
        near(ours, a @ b, a.double() @ b.double())


@pytest.mark.parametrize(
    ("m", "k", "n"), [(130, 70, 200), (1, 64, 40), (64, 1, 65), (200, 129, 7), (300, 24, 385)]
)
def test_products_in_every_layout(m: int, k: int, n: int) -> None:
    check(values(m, k), values(n, k, seed=1), values(m, n, seed=2))


def check_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    activation: str = "gelu_tanh",
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> None:
    """Gradients from dy, with a bias of 0, beside what PyTorch's operations and float64 give."""
    found = []
    for dtype in (torch.float32, torch.float64):
        one, w = x.to(dtype), weight.to(dtype)
        y, pre = reference.forward(one, w, None, activation, True)
        saved = {"none": None, "output": y, "pre": pre}[ACTIVATIONS[activation].saved]
        found.append(reference.backward(dy.to(dtype), saved, one, w, activation, needs))
        if dtype == torch.float32:
            ours = planes_backend.backward(dy, saved, x, weight, activation, needs)
    for own, theirs, oracle, wanted in zip(ours, *found, needs, strict=True):
        assert (own is None) == (not wanted)
        if wanted:
            near(own, theirs, oracle)


@pytest.mark.parametrize("activation", [*ACTIVATIONS])
def test_backward_of_every_activation(activation: str) -> None:
    if torch.empty(0).is_cpu and activation not in _EMULATED:
        pytest.skip("emulated kernels are compiled one by one")
    check_backward(values(150, 70, seed=2), values(150, 40), values(70, 40, seed=1), activation)


@pytest.mark.parametrize(
    "needs",
    [(True, False, False), (False, True, False), (False, False, True), (True, True, False)],
)
@pytest.mark.parametrize(("m", "k", "n"), [(130, 70, 200), (1, 64, 40), (64, 1, 65), (90, 24, 7)])
def test_backward_of_some(m: int, k: int, n: int, needs: tuple[bool, bool, bool]) -> None:
    dy, x, weight = values(m, n, seed=2), values(m, k), values(n, k, seed=1)
    check_backward(dy, x, weight, "silu", needs)
    check_backward(dy, x, weight, "none", needs)


@pytest.mark.parametrize(("m", "n"), [(70, 70), (150, 40), (63, 1), (1, 40)])
def test_backward_of_a_turned_gradient(m: int, n: int) -> None:
    """Its columns side by side, or a single one whose rows PyTorch calls contiguous."""
    x, weight = values(m, 50), values(n, 50, seed=1)
    for needs in ((True, True, False), (True, False, False), (False, True, False), (True,) * 3):
        check_backward(values(n, m, seed=2).t(), x, weight, "none", needs)
        check_backward(values(n, m, seed=2).t(), x, weight, "silu", needs)


@pytest.mark.parametrize("turned", [False, True])
def test_large_matrices_are_split_in_parts(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, dy = values(300, 50), values(270, 50, seed=1), values(300, 270, seed=2)
    if turned:
        x, dy = x.t().contiguous().t(), dy.t().contiguous().t()
    monkeypatch.setattr(planes_backend, "AT_ONCE", 128 * 50)
    y, pre = planes_backend.forward(x, weight, values(270, seed=3), "gelu", True)
    given = x, weight, values(270, seed=3)
    theirs = torch.nn.functional.linear(*given)
    oracle = torch.nn.functional.linear(*(t.double() for t in given))
    near(pre, theirs, oracle)
    near(y, torch.nn.functional.gelu(theirs), torch.nn.functional.gelu(oracle))
    monkeypatch.setattr(planes_backend, "AT_ONCE", 128 * 270)
    check(x, weight, dy)
    for needs in ((True, True, True), (False, False, True), (False, True, False)):
        check_backward(dy, x, weight, "silu", needs)
        check_backward(dy, x, weight, "none", needs)


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_backward_of_any_layout(activation: str) -> None:
    dy, x, weight = values(70, 90, seed=2), values(70, 40), values(90, 40, seed=1)
    check_backward(dy.t().contiguous().t(), x.t().contiguous().t(), weight, activation)
    check_backward(
        dy[:, :1].expand(70, 90), x[:, ::2], weight.t().contiguous().t()[:, ::2], activation
    )
    check_backward(
        values(70, 91, seed=2)[:, 1:], values(71 * 40)[1:2801].view(70, 40), weight, activation
    )


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 2.0**60])
def test_backward_without_planes(value: float) -> None:
    """Where numbers are multiplied themselves, those of the gradient are derived again."""
    dy, x, weight = values(140, 70, seed=2), values(140, 36), values(70, 36, seed=1)
    for t, at in ((dy, (77, 13)), (x, (20, 30)), (weight, (3, 35))):
        kept, t[at] = float(t[at]), value
        check_backward(dy, x, weight, "silu" if t is dy else "relu")
        t[at] = kept
    dy[:, ::2] *= 2.0**-40
    check_backward(dy, x, weight)


@pytest.mark.parametrize("slices", [1, 2])
def test_bias_and_activation(slices: int) -> None:
    x, weight, bias = values(71, 200), values(33, 200, seed=1), values(33, seed=2)
    a, b = split((x, weight), (False, False))
    y, pre = planes_product.product(a, b, bias, "gelu", True, config=Config(slices=slices))
    theirs = torch.nn.functional.linear(x, weight, bias)
    oracle = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    near(pre, theirs, oracle)
    near(y, torch.nn.functional.gelu(theirs), torch.nn.functional.gelu(oracle))


def multiply(
    a: Tensor | Source, b: Tensor, config: Config, turned: tuple[bool, bool] = (False, False)
) -> Tensor:
    """A Bᵀ, with A split before or there; ``turned``: operands that lie across K."""
    (second,) = split((b.t().contiguous() if turned[1] else b,), turned[1:])
    source = a if isinstance(a, Source) else Source(a.t().contiguous() if turned[0] else a)
    if config.reads:
        assert planes_product.can_be_read(source)
        return planes_product.product(source, second, config=config)[0]
    ways = source._replace(by_rows=not turned[0], by_columns=turned[0])
    return planes_product.product(*planes_split.split([ways]), second, config=config)[0]


def alike(ours: Tensor, theirs: Tensor) -> None:
    """As near as two orders of adding are; NaN and infinities in the same places."""
    most = theirs.nan_to_num(0, 0, 0).abs().amax(1, keepdim=True)
    torch.testing.assert_close(ours / most, theirs / most, rtol=1e-6, atol=1e-6, equal_nan=True)


_DIRECT = [
    Config(64, 4, reads=True),
    Config(64, 3, reads=True, slices=2),
    Config(128, 3, reads=True, slices=2),
    Config(128, 2, reads=True),
]


@pytest.mark.parametrize("config", _DIRECT, ids=str)
@pytest.mark.parametrize(("m", "k", "n"), [(130, 200, 70), (1, 132, 9), (300, 256, 129)])
def test_numbers_that_are_read(m: int, k: int, n: int, config: Config) -> None:
    x, weight = values(m, k), values(n, k, seed=1)
    x[:, 64:128] *= 2.0**-40
    for turned in (False, True):
        ours = multiply(x, weight, config, (False, turned))
        near(ours, x @ weight.t(), x.double() @ weight.double().t())


@pytest.mark.parametrize("config", _DIRECT, ids=str)
def test_small_numbers_that_are_read_count_once(config: Config) -> None:
    """Of some rows, beside large ones whose weights are 0."""
    x, weight = values(140, 132), values(70, 132, seed=1)
    weight[:, ::2] = 0
    x[20:30, 1::2] *= 2.0**-35
    x[77:, 1::2] *= 2.0**-40
    near(multiply(x, weight, config), x @ weight.t(), x.double() @ weight.double().t())
    rows = slice(77, 140)
    ours, theirs = multiply(x, weight, config)[rows], (x @ weight.t())[rows]
    near(ours, theirs, x[rows].double() @ weight.double().t())


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 2.0**60])
@pytest.mark.parametrize("which", ["a", "b", "both"])
def test_any_numbers_that_are_read(which: str, value: float) -> None:
    """Of rows of one consumer and of both."""
    x, weight = values(140, 132), values(70, 132, seed=1)
    for t, at in ((x, (77, 13)), (x, (3, 70)), (weight, (20, 131)), (weight, (69, 13))):
        if which in ("both", "a" if t is x else "b"):
            t[at] = value
    for config in _DIRECT:
        apart = replace(config, reads=False)
        alike(multiply(x, weight, config), multiply(x, weight, apart))


def test_calls_that_split_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and dx alone, where that is predicted to be faster, and where it cannot be done."""
    read = []

    def predicted(*given: int) -> bool:
        read.append(given[:3])
        return True

    monkeypatch.setattr(planes_product, "split_late", predicted)
    dy, x, weight = values(150, 72, seed=2), values(150, 40), values(72, 40, seed=1)
    check(x, weight, dy)
    assert set(read) == {(150, 72, 40), (150, 40, 72)}
    read.clear()
    check_backward(dy, x, weight, "none", (True, False, False))
    assert read == [(150, 40, 72)]
    read.clear()
    for needs in ((True, True, True), (True, False, True), (False, True, True)):
        check_backward(dy, x, weight, "none", needs)
    check_backward(dy, x, weight, "silu", (True, False, False))
    check(values(150, 41), values(70, 41), values(150, 70))
    assert not read


def test_what_can_be_read() -> None:
    x = values(20, 64)
    assert planes_product.can_be_read(Source(x))
    assert planes_product.can_be_read(Source(x[:, :30]))
    assert not planes_product.can_be_read(Source(x.t()))
    assert not planes_product.can_be_read(Source(x[:, 1:]))
    gated = Source(x, derivation=Derivation.GATED, saved=x, activation="silu")
    assert not planes_product.can_be_read(gated)
    assert not planes_product.can_be_read(Source(x[:1].expand(20, 64)))


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("n", [70, 33, 1])
def test_added_to_what_is_there(n: int, slices: int) -> None:
    """Pairs of columns, odd rows of them, and memory that begins between pairs."""
    x, weight = values(71, 200), values(n, 200, seed=1)
    planes = split((x, weight), (False, False))
    for skipped in (0, 1):
        y = values(71 * n + 1, seed=2)[skipped:][: 71 * n].view(71, n)
        before, config = y.clone(), Config(64, 4, slices=slices)
        ours, _ = planes_product.product(*planes, into=(y, None), added=True, config=config)  # type: ignore[misc]
        assert ours is y
        near(y, before + x @ weight.t(), before.double() + x.double() @ weight.double().t())


@pytest.mark.parametrize(
    ("config", "turned"),
    [
        (Config(64, 4), (False, False)),
        (Config(128, 2), (False, True)),
        (Config(128, 3), (False, True)),
        (Config(64, 4), (True, False)),
        (Config(128, 3, group_m=2), (True, True)),
        (Config(128, 3, group_m=1), (True, False)),
    ],
    ids=str,
)
def test_every_configuration(config: Config, turned: tuple[bool, bool]) -> None:
    a, b = values(270, 330), values(400, 330, seed=1)
    planes = [
        split((t.t().contiguous() if by_columns else t,), (by_columns,))[0]
        for t, by_columns in zip((a, b), turned, strict=True)
    ]
    for slices in (1, 2):
        given = replace(config, slices=slices)
        ours, _ = planes_product.product(*planes, config=given)  # type: ignore[misc]
        near(ours, a @ b.t(), a.double() @ b.double().t())


@pytest.mark.parametrize("config", [Config(64, 4), Config(128, 3)])
@pytest.mark.parametrize("turned", [(False, False), (True, True)])
def test_blocks_of_one_scale(config: Config, turned: tuple[bool, bool]) -> None:
    """Of their lines' scales the first alone is looked at; other blocks are beside them."""
    a, b = values(150, 330), values(90, 330, seed=1)
    a[3], b[5], a[40, :64], b[:, 100:180] = 0, 0, 0, 0
    a[:64, 64:128] *= 2.0**30
    a[90, 200:260], b[7, :64] = a[90, 200:260] * 2.0**40, float("inf")
    planes = split(
        [
            t.t().contiguous() if by_columns else t
            for t, by_columns in zip((a, b), turned, strict=True)
        ],
        turned,
    )
    uniform = [(one.small & 2).bool() for one in planes]
    assert [(~found).sum() for found in uniform] == [2, 1]
    both = uniform[0].all(1) & uniform[1].all(1)
    assert both.tolist() == [False, True, True, False, False, True]
    for one in planes:
        behind = torch.arange(one.scales.shape[1]) % 64 > 0
        one.scales[1:3, behind] = one.scales[5:, behind] = float("nan")
    ours, _ = planes_product.product(*planes, config=config)  # type: ignore[misc]
    kept = torch.arange(90) != 7
    theirs, oracle = a @ b[kept].t(), a.double() @ b[kept].double().t()
    near(ours[:, kept], theirs, oracle)


@pytest.mark.parametrize("reads", [False, True])
def test_what_sums_cut_off_is_restored(reads: bool) -> None:
    """Of positive numbers each sum over 64 is 2^-23 too small in the mean."""
    x, weight = values(64, 320).abs(), values(64, 320, seed=1).abs()
    b, split_x = split((weight, x), (False, False))
    ours, _ = planes_product.product(Source(x) if reads else split_x, b)
    oracle = x.double() @ weight.double().t()
    off = (ours.double() - oracle) / oracle
    assert off.norm() / 64 < 7e-8
    assert off.mean().abs() < 3e-8


def test_rows_and_columns_of_any_scale() -> None:
    x, weight, dpre = values(150, 90), values(40, 90, seed=1), values(150, 40, seed=2)
    rows = torch.exp2(torch.linspace(-60, 60, 150))[:, None]
    for t in (x * rows, x * 2.0**-140, x * 2.0**100, x * torch.exp2(torch.arange(90.0) / -4)):
        ours, _ = planes_backend.forward(t, weight, None, "none", False)
        theirs, oracle = t @ weight.t(), t.double() @ weight.double().t()
        for one, own, exact in zip(ours, theirs, oracle, strict=True):
            near(one, own, exact)
    check(x, weight * 2.0**-130, dpre * 2.0**-100)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 2.0**60])
def test_lines_without_planes(value: float) -> None:
    """One number that no plane can hold beside others: PyTorch's results, and exact others."""
    x, weight, dpre = values(140, 70), values(36, 70, seed=1), values(140, 36, seed=2)
    for t, at in ((x, (77, 13)), (weight, (20, 69)), (dpre, (3, 35))):
        kept, t[at] = float(t[at]), value
        weight[5] = 0 if t is not weight else weight[5]
        check(x, weight, dpre)
        t[at] = kept


@pytest.mark.parametrize(("m", "k"), [(70, 150), (1, 64), (64, 1), (130, 65)])
def test_planes_are_the_numbers(m: int, k: int) -> None:
    """By rows and by columns in one launch: 22 bits of each, scales from each segment's largest."""
    x = values(m, k) * torch.exp2(values(m, k, seed=1).clamp(-3, 3) * 3)
    x[:, :64] *= 2.0**-100
    x[0, k // 2] = 0
    for planes in split((x, x), (False, True)):
        kept = x.t() if planes.by_columns else x
        high, low = (t.t() if planes.by_columns else t for t in planes[:2])
        scales = planes.scales.repeat_interleave(64, 0)[: kept.shape[1], : kept.shape[0]].t()
        assert torch.equal(scales, torch.exp2(scales.log2().round()))
        made = (high.double() + low.double() / 2048) * scales.double()
        assert ((made - kept).abs() <= kept.abs() * 2.0**-22).all()
        for segment in range(0, kept.shape[1], 64):
            largest = kept[:, segment : segment + 64].abs().amax(1) / scales[:, segment]
            for block, lines in enumerate(largest.split(64)):
                uniform = planes.small[segment // 64, block] & 2
                assert bool(uniform) == ((block if planes.by_columns else segment) > 0)
                if uniform:
                    assert (
                        scales[64 * block : 64 * block + len(lines), segment].unique().numel() == 1
                    )
                    lines = lines.amax(0)
                assert ((lines == 0) | (lines >= 2.0**14) & (lines < 2.0**15)).all()


def test_planes_by_rows_are_those_by_columns_where_a_block_has_one_scale() -> None:
    """The others have planes of their own; a product takes each block's."""
    x, dpre = values(150, 90), values(150, 200, seed=1)
    dpre[70, 100] *= 2.0**50  # too far above others of its rows and columns
    dpre[140, 3] = float("inf")
    x[3, 70] *= 2.0**-40
    both = Source(dpre, by_rows=True, by_columns=True)
    rows, columns, turned = planes_split.split((both, Source(x, by_columns=True)))
    shared = torch.ones(3, 4, dtype=torch.bool)
    shared[1, 1] = shared[2, 0] = False
    assert torch.equal((columns.small & 4).bool(), shared)
    assert torch.equal((rows.small.t() & 2).bool(), shared)
    assert torch.equal(
        (turned.small & 6), torch.tensor([[2, 0], [2, 2], [2, 2]], dtype=torch.int32)
    )
    assert columns.shared[0] is rows.high
    dpre[140, 3] = 1.0
    for config in (Config(128, 3), Config(64, 4, slices=2)):
        rows, columns, turned = planes_split.split((both, Source(x, by_columns=True)))
        dw, _ = planes_product.product(columns, turned, config=config)
        near(dw, dpre.t() @ x, dpre.double().t() @ x.double())


def test_which_segments_have_no_planes() -> None:
    x = values(9, 200)
    x[0, 70], x[1, 0], x[2, 199] = float("inf"), float("nan"), float("-inf")
    x[3, 130], x[4, :64], x[5] = 2.0**70, x[4, :64].sign() * 2.0**90, x[5] * 2.0**87
    x[6], x[7, 64:128] = x[6].sign() * 2.0**-137, x[7, 64:128] * 2.0**-40
    expected = torch.zeros(9, 4, dtype=torch.bool)
    for line, segment in ((0, 1), (1, 0), (2, 3), (3, 2), (4, 0)):
        expected[line, segment] = True
    expected[6] = True
    for planes in split((x, x.t().contiguous()), (False, True)):
        assert torch.equal(planes.scales[:, :9].t() == -1, expected)
        assert (planes.scales[:, :9].t()[~expected] > 0).all()
        high, low = (t.t() if planes.by_columns else t for t in planes[:2])
        without = expected.repeat_interleave(64, 1)[:, :200]
        assert not high[without].any()
        assert not low[without].any()


def test_zeros_and_small_beside_large() -> None:
    x = torch.diag(torch.tensor([3.0, 5.0 * 2.0**-27]))
    weight = torch.tensor([[1.0, 2.0], [0.0, 7.0], [2.0**-40, 1.0]])
    ours, _ = planes_backend.forward(x, weight, None, "none", False)
    assert torch.equal(ours, x @ weight.t())
    one = torch.tensor([[3.0, 5.0 * 2.0**-27]])
    ours, _ = planes_backend.forward(one, torch.eye(2), None, "none", False)
    assert torch.allclose(ours, one, rtol=2.0**-21, atol=0)
    far = torch.tensor([[2.0**60, *[1.0] * 63]])
    skip = torch.tensor([[0.0, *[1.0] * 63]])
    ours, _ = planes_backend.forward(far, skip, None, "none", False)
    assert ours.item() == 63.0
    zeros = torch.zeros(5, 12)
    assert not planes_backend.forward(zeros, values(8, 12), None, "none", False)[0].any()


def test_segments_of_any_scale() -> None:
    """Where one operand is 0, the other's numbers may be of any size, and do not take part."""
    x, weight = values(20, 256), values(30, 256, seed=1)
    x[:, 64:128] *= 2.0**80
    x[:, 128:192] *= 2.0**-80
    for begin in range(0, 256, 64):
        alone = torch.zeros_like(weight)
        alone[:, begin : begin + 64] = weight[:, begin : begin + 64]
        ours, _ = planes_backend.forward(x, alone, None, "none", False)
        near(ours, x @ alone.t(), x.double() @ alone.double().t())
        transposed = alone.t().contiguous()
        near(
            planes_backend.grad_input(x, transposed),
            x @ transposed,
            x.double() @ transposed.double(),
        )


@pytest.mark.parametrize(
    ("mine", "theirs"), [(88, 30), (100, 20), (-130, 100), (-147, 120), (-60, -60)]
)
def test_scales_that_meet_others(mine: int, theirs: int) -> None:
    """Very large or small numbers, of which products are neither."""
    x, weight = values(30, 100), values(20, 100, seed=1)
    x, weight = x.sign() * x.abs().clamp(1) * 2.0**mine, weight * 2.0**theirs
    for a, b in ((x, weight), (weight, x)):
        ours, _ = planes_backend.forward(a, b, None, "none", False)
        near(ours, a @ b.t(), a.double() @ b.double().t())


def test_outliers() -> None:
    """In one number, a row and a column of either operand; PyTorch's sums are no better."""
    for at in ((3, 17), (slice(None), 17), (3, slice(None))):
        x, weight, dpre = values(100, 90), values(70, 90, seed=1), values(100, 70, seed=2)
        x[at] *= 2.0**60
        check(x, weight, dpre)
        check(weight.new_ones(100, 90), x[:70], dpre)
        dpre[at] *= 2.0**60
        check(x, weight, dpre)


def test_sums_that_cancel() -> None:
    half, weight = values(60, 96), values(40, 96, seed=1)
    x = torch.cat([half, -half], 1)
    twice = torch.cat([weight, weight * (1 + 2.0**-12 * values(40, 96, seed=2))], 1)
    ours, _ = planes_backend.forward(x, twice, None, "none", False)
    near(ours, x @ twice.t(), x.double() @ twice.double().t())


@pytest.mark.parametrize("slices", [1, 2])
def test_infinities_and_nan_come_out_where_pytorch_has_them(slices: int) -> None:
    x, weight, bias = values(150, 200), values(70, 200, seed=1), values(70, seed=2)
    x[7, 3], x[7, 150], x[20, 199], x[149, 64] = (float(v) for v in ("inf", "inf", "nan", "-inf"))
    weight[9, 3], weight[11, 150], weight[69, 64], weight[30, 100] = 0, -1, 0, float("inf")
    x[50] = 0
    planes = split((x, weight), (False, False))
    config = Config(64, 4, slices=slices)
    ours, _ = planes_product.product(*planes, bias, "none", config=config)  # type: ignore[misc]
    theirs = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.isinf(), theirs.isinf())
    assert torch.equal(ours[ours.isinf()], theirs[theirs.isinf()])
    finite = theirs.isfinite()
    oracle = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    near(ours[finite], theirs[finite], oracle[finite])


@pytest.mark.parametrize("column", [0, 64, 100, 150, 191])
def test_columns_without_planes(column: int) -> None:
    a, b = values(20, 150), values(192, 150, seed=1)
    b[column, 70] = float("inf")
    planes = split((a, b), (False, False))
    ours, _ = planes_product.product(*planes, config=Config(128, 3))  # type: ignore[misc]
    assert ours[:, column].isinf().all()
    ours, theirs, oracle = (
        torch.cat([t[:, :column], t[:, column + 1 :]], 1)
        for t in (ours, a @ b.t(), a.double() @ b.double().t())
    )
    near(ours, theirs, oracle)


@pytest.mark.parametrize("bits", [8, 14, 20])
@pytest.mark.parametrize("wide", ["a", "b", "both"])
@pytest.mark.parametrize(
    "config",
    [
        Config(64, 4),
        Config(128, 3, slices=2),
        Config(64, 4, reads=True),
        Config(128, 2, reads=True),
    ],
    ids=str,
)
def test_numbers_of_any_size_beside_each_other(wide: str, config: Config, bits: int) -> None:
    """Each output, where the other operand is 0 beside all but one of the sizes."""
    a, b = values(150, 200), values(200, 200, seed=1)
    sizes = torch.exp2((torch.arange(200.0) % 5 - 2) * bits)
    if wide != "b":
        a[:70] *= sizes
    if wide != "a":
        b[60:] *= sizes
    b[::3, 100:], a[1::2, :64] = 0, values(75, 64, seed=2)
    for only in ((bits // 2 + i) % 5 for i in (0, 2, 3)):  # each with some bits
        keep = (torch.arange(200) % 5 == only).float()
        one, other = (a * keep, b) if wide == "b" else (a, b * keep)
        turned = only % 2 == 1
        ours = multiply(one, other, config, (turned and not config.reads, turned))
        theirs, oracle = one @ other.t(), one.double() @ other.double().t()
        for row in range(0, 150, 7):
            near(ours[row], theirs[row], oracle[row])


@pytest.mark.parametrize(
    "config",
    [*(Config(bn, stages) for bn, stages in STAGES.items()), _DIRECT[0], _DIRECT[2]],
    ids=str,
)
def test_small_numbers_that_meet_small_ones(config: Config) -> None:
    """Where either operand has large ones, the other is 0."""
    a, b = values(150, 200), values(200, 200, seed=1)
    a[:, 1::3], a[:, 2::3] = a[:, 1::3] * 2.0**-40, 0
    b[:, 1::3], b[:, 0::3] = b[:, 1::3] * 2.0**-35, 0
    near(multiply(a, b, config), a @ b.t(), a.double() @ b.double().t())


@pytest.mark.parametrize(
    ("largest", "below"),
    [
        ((-55, 60), (28, 28)),
        ((-57, 60), (28, 28)),
        ((-100, 74), (27, 27)),
        ((-112, 74), (27, 27)),
        ((-80, 80), (40, 35)),
        ((-100, 80), (30, 35)),
        ((-60, 80), (50, 50)),
        ((-40, 40), (56, 56)),
        ((60, 60), (30, 50)),
        ((-70, 20), (30, 30)),
    ],
)
def test_products_of_small_numbers_stay_in_range(
    largest: tuple[int, int], below: tuple[int, int]
) -> None:
    """Large ones meet zeros, whatever the scales of both operands."""
    a, b = (values(12, 64, seed=i).sign() * (1 + values(12, 64, seed=i + 2).abs()) for i in (0, 1))
    a[:, 0::3] *= 2.0 ** largest[0]
    b[:, 1::3] *= 2.0 ** largest[1]
    b[:, 0::3], a[:, 1::3] = 0, 0
    a[:, 2::3] *= 2.0 ** (largest[0] - below[0])
    b[:, 2::3] *= 2.0 ** (largest[1] - below[1])
    for one, other in ((a, b), (b, a)):
        for config in (Config(64, 4), _DIRECT[0]):
            ours = multiply(one, other, config)
            near(ours, one @ other.t(), one.double() @ other.double().t())


@pytest.mark.parametrize("bits", [56, 60, 70])
def test_bits_are_lost_beyond_two_levels(bits: int) -> None:
    """The last step is 2^-79 of the largest, some 2^2 times a number of its size."""
    a, b = values(12, 64), values(12, 64, seed=1)
    small = torch.arange(64) % 10 < 3
    a[:, small] *= 2.0**-bits
    b[:, ~small] = 0
    ours, _ = planes_backend.forward(a, b, None, "none", False)
    assert relative_error(ours, a.double() @ b.double().t()) < 2.0 ** (bits - 78)


def test_tiny_gradients() -> None:
    check(values(90, 70), values(40, 70, seed=1), values(90, 40, seed=2) * 1e-30)


def test_numbers_that_begin_anywhere() -> None:
    def moved(t: Tensor, by: int) -> Tensor:
        return torch.cat([t.new_zeros(by), t.flatten()])[by:].view(t.shape)

    x, weight, dpre = values(40, 37), values(24, 37, seed=1), values(40, 24, seed=2)
    check(moved(x, 1), moved(weight, 3), moved(dpre, 2))
    wide = values(40, 80)
    check(wide[:, 1:38], moved(weight, 1), wide[:, ::2][:, :24])


def test_an_empty_slice_is_refused() -> None:
    a, b = split((values(8, 200), values(8, 200, seed=1)), (False, False))
    with pytest.raises(UnsupportedError, match="the last is empty"):
        planes_product.product(a, b, config=Config(slices=3))


def test_a_plan_serves_its_kind_alone() -> None:
    """The same sizes, other addresses, strides and activations, one after the other."""
    weight = values(24, 36, seed=1)
    memory = torch.cat([values(60, 72), values(1, 72, seed=4)]).flatten()
    for offset, stride in ((0, 36), (1, 36), (0, 72), (2, 72), (0, 36)):
        x = memory[offset : offset + 60 * stride].view(60, stride)[:, :36]
        kept = float(x[3, 7])
        for value in (kept, float("inf"), kept):
            x[3, 7] = value
            check(x, weight, values(60, 24, seed=2))
    for activation in ("relu", "tanh", "none"):
        ours, _ = planes_backend.forward(x, weight, None, activation, False)
        given = x.double() @ weight.double().t()
        exact = {"relu": torch.relu, "tanh": torch.tanh, "none": torch.clone}[activation]
        near(ours, exact(x @ weight.t()), exact(given))


def test_launches_of_two_threads_take_their_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that stops between a slice's product and the sums finds its tensors again."""
    if not torch.empty(0).is_cpu:
        pytest.skip("of emulated launches")
    config, began, ended = Config(64, 4, slices=2), threading.Event(), threading.Event()
    pairs = {name: (values(40, 200, seed=i), values(30, 200)) for i, name in enumerate("ab")}
    planes = {name: split(pair, (False, False)) for name, pair in pairs.items()}
    planes_product.product(*planes["a"], config=config)
    run, found = emulation.Launch.run, {}

    def slowly(self: Any, stream: Any) -> None:
        name = threading.current_thread().name
        if (name, self._name) == ("a", SUMS_KERNEL):
            began.set()
            ended.wait(10)
        run(self, stream)
        if (name, self._name) == ("b", KERNEL):
            ended.set()

    def call(name: str) -> None:
        if name == "b":
            began.wait(10)
        found[name] = planes_product.product(*planes[name], config=config)[0]

    monkeypatch.setattr(emulation.Launch, "run", slowly)
    threads = [threading.Thread(target=call, args=(name,), name=name) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, (a, b) in pairs.items():
        near(found[name], a @ b.t(), a.double() @ b.double().t())


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("place", ["cuda"], indirect=True)
@pytest.mark.parametrize(
    ("m", "k", "n"), [(4103, 1030, 2051), (70_001, 256, 256), (129, 8192, 300), (8192, 64, 64)]
)
def test_many_numbers(m: int, k: int, n: int) -> None:
    for make in (
        lambda t: t,
        torch.relu,
        lambda t: t**5,
        lambda t: t * torch.exp2(4 * values(t.shape[0], 1, seed=9)),
    ):
        x, weight, dpre = values(m, k), values(n, k, seed=1), values(m, n, seed=2)
        check(make(x), make(weight), make(dpre))
        check_backward(make(dpre), x, weight, "silu")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("place", ["cuda"], indirect=True)
@pytest.mark.parametrize(("bn", "stages"), STAGES.items())
def test_the_same_bits_every_time(bn: int, stages: int) -> None:
    """Of many tiles a block; some blocks have several scales, and some small numbers."""
    x, weight = values(20_000, 700), values(900, 700, seed=1)
    x[5000:9000:7, 500], x[3000:4000, 65] = 2.0**30, 2.0**-28
    a, b = split((x, weight), (False, False))
    config = Config(bn, stages)
    first, _ = planes_product.product(a, b, config=config)
    alike(first, (x.double() @ weight.double().t()).float())
    for _ in range(100):
        assert torch.equal(planes_product.product(a, b, config=config)[0], first)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("place", ["cuda"], indirect=True)
@pytest.mark.parametrize("bn", [64, 128])
def test_numbers_that_are_read_give_the_same_bits_every_time(bn: int) -> None:
    """Of many tiles a block, some with planes of the second level and some without planes."""
    x, weight = values(40_000, 260), values(200, 260, seed=1)
    x[::7, 3], x[100:20_000:5, 64:100] = 2.0**60, x[100:20_000:5, 64:100] * 2.0**-33
    given = Source(x)
    config = Config(bn, 2, reads=True)
    first = multiply(given, weight, config)
    alike(first, multiply(given, weight, replace(config, reads=False)))
    for _ in range(100):
        assert torch.equal(multiply(given, weight, config), first)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("place", ["cuda"], indirect=True)
def test_sums_of_products_one_behind_the_other() -> None:
    x, weight = values(500, 300), values(90, 300, seed=1)
    planes = split((x, weight), (False, False))
    y = torch.zeros(500, 90)
    for _ in range(20):
        planes_product.product(*planes, into=(y, None), added=True)  # type: ignore[misc]
    expected, _ = planes_product.product(*planes)  # type: ignore[misc]
    torch.testing.assert_close(y, 20 * expected, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("place", ["cuda"], indirect=True)
def test_recorded_in_a_graph() -> None:
    x, weight, dpre = values(300, 200), values(100, 200, seed=1), values(300, 100, seed=2)

    def run() -> list[Tensor]:
        return [
            planes_backend.forward(x, weight, None, "none", False)[0],
            planes_backend.grad_input(dpre, weight),
            planes_backend.grad_weight(dpre, x),
            planes_backend.backward(dpre, dpre, x, weight, "silu", (False, True, True))[1],
        ]

    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    x.copy_(x.flip(0))
    dpre.copy_(dpre.flip(0))
    graph.replay()
    for ours, own in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(ours, own.flip(0))
    near(found[2], dpre.t() @ x, dpre.double().t() @ x.double())
    given = [t.double() for t in (dpre, dpre, x, weight)]
    theirs = reference.backward(dpre, dpre, x, weight, "silu", (False, True, True))[1]
    near(found[3], theirs, reference.backward(*given, "silu", (False, True, True))[1])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("place", ["cuda"], indirect=True)
def test_public_calls_by_tapes() -> None:
    """More steps than a recording takes; the backward is by planes, too."""
    x, weight, bias = values(4096, 1024), values(2048, 1024, seed=1), values(2048, seed=2)
    dy = values(4096, 2048, seed=3)

    def own(dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight, bias)]
        y = torch.nn.functional.linear(*leaves)
        return list(torch.autograd.grad(y, leaves, dy.to(dtype)))

    theirs, oracle = own(torch.float32), own(torch.float64)
    for _ in range(15):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        y = fastlinear.linear_act(*leaves, backend="planes")
        for trio in zip(torch.autograd.grad(y, leaves, dy), theirs, oracle, strict=True):
            near(*trio)
