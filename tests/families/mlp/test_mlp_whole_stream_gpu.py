"""Weights streamed over all multiprocessors: the kernel on Hopper."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import NAMES
from fastlinear.core.compare import judge
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.cuda import backend
from fastlinear.families.mlp.cuda.choice import best
from fastlinear.families.mlp.cuda.stream import Stream
from fastlinear.native import cuda_driver as driver
from tests.families.hopper_only import on_hopper
from tests.families.mlp.stream_chains import EVEN, UNEVEN

BF16, F16 = torch.bfloat16, torch.float16


Inputs = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor | None, ...]]


def _inputs(
    rows: int, widths: tuple[int, ...], dtype: torch.dtype, bias: str = "yes", seed: int = 0
) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(rows + seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    weights = tuple((draw(n, k) * (1.5 / k) ** 0.5).to(dtype) for k, n in pairwise(widths))
    biases = tuple(
        (draw(n) * 0.3).to(dtype) if bias == "yes" or (bias == "some" and i % 2 == 0) else None
        for i, n in enumerate(widths[1:])
    )
    return draw(rows, widths[0]).to(dtype), weights, biases


def _stream(inputs: Inputs) -> Stream:
    x, weights, _ = inputs
    widths = (x.shape[1], *[w.shape[0] for w in weights])
    stream = best("stream", widths, x.shape[0], 2)
    assert isinstance(stream, Stream)
    return stream


def _forward(inputs: Inputs, stream: Stream | None = None) -> Tensor:
    config = stream or _stream(inputs)
    return backend.forward(*inputs, "relu", "none", False, config=config)[0]


def _assert_right(
    inputs: Inputs, activation: str, final: str, save: bool, stream: Stream | None = None
) -> None:
    x, weights, biases = inputs
    y, saved = backend.forward(
        x, weights, biases, activation, final, save, config=stream or _stream(inputs)
    )
    truth, kept = reference.forward(
        x.double(),
        tuple(w.double() for w in weights),
        tuple(None if b is None else b.double() for b in biases),
        activation,
        final,
        save,
    )
    plain, plain_kept = reference.forward(x, weights, biases, activation, final, save)
    pairs = zip((y, *saved), (plain, *plain_kept), (truth, *kept), strict=True)
    for i, (ours, theirs, oracle) in enumerate(pairs):
        assert ours.isfinite().all(), f"{i}: not every element was written"
        verdict = judge(f"y, saved…[{i}]", ours, theirs, oracle)
        assert verdict.passed, str(verdict)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("widths", EVEN + UNEVEN, ids=str)
@pytest.mark.parametrize("rows", [1, 33, 64, 65, 128])
def test_widths_and_rows(widths: tuple[int, ...], rows: int) -> None:
    dtype = F16 if rows in (33, 65) else BF16
    _assert_right(_inputs(rows, widths, dtype, "some"), "relu", "none", False)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("width", "rows"), [(1024, 16), (1024, 48), (2048, 64), (4096, 100)])
def test_sums_that_cancel(width: int, rows: int, dtype: torch.dtype) -> None:
    """Partial sums of hundreds, results near 1: what a block hands on has to carry their ends."""
    x, weights, biases = _inputs(rows, (width,) * 3, dtype, "no")
    sign = torch.ones(width, device="cuda")
    sign[width // 2 :] = -1
    x = (1 + 0.05 * x.float()).to(dtype)
    noise = [2.0**-9 * width**0.5 * w.float() for w in weights]
    weights = tuple((sign + part).to(dtype) for part in noise)
    call = x, weights, biases, "none", "none", False
    got = backend.forward(*call)[0]
    exact = [t.double() for t in (x, *weights)]
    oracle = reference.forward(exact[0], tuple(exact[1:]), biases, "none", "none", False)[0]
    verdict = judge("y", got, reference.forward(*call)[0], oracle)
    assert verdict.passed, str(verdict)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("widths", [(1280,) * 4, (72, 1400, 1288, 37)], ids=str)
def test_every_activation_and_what_the_backward_reads(
    activation: str, widths: tuple[int, ...]
) -> None:
    _assert_right(_inputs(33, widths, BF16), activation, "silu", True)
    _assert_right(_inputs(70, widths, F16), "relu", activation, True)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    "stream",
    [
        Stream(8, 15, 6, 2),
        Stream(2, 60, 8, 4),
        Stream(4, 9, 4, 1),
        Stream(4, 30, 24, 3),
        Stream(4, 28, 8, 3, 2),
    ],
    ids=str,
)
def test_every_way_of_sharing(stream: Stream) -> None:
    for widths in ((1536,) * 4, (1000, 1536, 24, 1040)):
        _assert_right(_inputs(50, widths, BF16), "relu", "none", False, stream)


@on_hopper
@pytest.mark.gpu
def test_where_x_and_weights_lie() -> None:
    x, weights, biases = _inputs(50, (1280,) * 4, BF16)
    want = _forward((x, weights, biases))
    for length, start in ((1304, 16), (1304, 2), (1289, 0)):  # the last two are copied
        wide = torch.full((50, length), torch.nan, device="cuda", dtype=BF16)
        wide[:, start : start + 1280] = x
        assert torch.equal(_forward((wide[:, start : start + 1280], weights, biases)), want)
    off = tuple(torch.cat([w.flatten()[:1], w.flatten()])[1:].view_as(w) for w in weights)
    assert off[0].data_ptr() % 16
    assert torch.equal(_forward((x, off, biases)), want)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(1280,) * 5, (1000, 2048, 24, 1040, 7)], ids=str)
@pytest.mark.parametrize("rows", [64, 128])
def test_ten_thousand_launches_are_bit_equal(widths: tuple[int, ...], rows: int) -> None:
    inputs = _inputs(rows, widths, BF16)
    first = _forward(inputs)
    differs = torch.zeros((), device="cuda", dtype=torch.bool)
    for _ in range(10_000 if rows == 64 else 2_000):
        differs |= (_forward(inputs) != first).any()
    assert not differs


@on_hopper
@pytest.mark.gpu
def test_beside_another_stream_that_fills_the_device() -> None:
    inputs = _inputs(64, (2048,) * 5, BF16)
    want = _forward(inputs)
    differs = torch.zeros((), device="cuda", dtype=torch.bool)
    busy, other = torch.randn(4096, 4096, device="cuda", dtype=BF16), torch.cuda.Stream()
    for _ in range(300):
        with torch.cuda.stream(other):
            torch.mm(busy, busy)
        differs |= (_forward(inputs) != want).any()
    torch.cuda.synchronize()
    assert not differs


@on_hopper
@pytest.mark.gpu
def test_launches_of_other_inputs_on_one_workspace_and_on_several_streams() -> None:
    """Buffers that an earlier launch filled are never taken for this one's."""
    sets = [_inputs(rows, (1536,) * 6, BF16) for rows in (64, 63, 62)]
    stream = _stream(sets[0])
    wants = [_forward(inputs, stream) for inputs in sets]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    wrong = [torch.zeros((), device="cuda", dtype=torch.bool) for _ in streams]
    for turn in range(300):
        for i, other in enumerate(streams):
            with torch.cuda.stream(other):
                which = (turn + i) % 3
                wrong[i] |= (_forward(sets[which], stream) != wants[which]).any()
    torch.cuda.synchronize()
    assert not any(bool(w) for w in wrong)


@on_hopper
@pytest.mark.gpu
def test_graphs_weights_written_just_before_and_weights_elsewhere() -> None:
    x, weights, biases = _inputs(64, (1536,) * 4, BF16)
    others = _inputs(64, (1536,) * 4, BF16, seed=1)[1]
    want = [_forward((x, w, biases)) for w in (weights, others)]
    held = tuple(w.clone() for w in weights)

    def calls() -> list[Tensor]:
        made = []
        for source in (others, weights, others):
            for to, new in zip(held, source, strict=True):
                to.copy_(new)
            made.append(_forward((x, held, biases)))
        return [*made, _forward((x, others, biases))]

    for _ in range(20):
        for got, i in zip(calls(), (1, 0, 1, 1), strict=True):
            assert torch.equal(got, want[i])
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            graphs.append((graph, calls()))
    for _ in range(20):
        for graph, made in graphs:
            graph.replay()
            for got, i in zip(made, (1, 0, 1, 1), strict=True):
                assert torch.equal(got, want[i])


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("widths", [(1280,) * 4, (1000, 1288, 1032, 9)], ids=str)
@pytest.mark.parametrize("rows", [20, 90])
def test_nan_and_infinity_do_not_hang_and_go_through(
    widths: tuple[int, ...], rows: int, dtype: torch.dtype
) -> None:
    x, weights, biases = _inputs(rows, widths, dtype)
    x[1, 5] = torch.nan
    x[2, 7] = torch.inf
    if dtype == F16:
        x[4] = torch.finfo(dtype).max  # so that hidden activations overflow
    ones = torch.tensor(-1, dtype=torch.int16, device="cuda").view(dtype)  # a NaN of all bits
    x[3, 8] = ones
    plain, _ = reference.forward(x, weights, biases, "relu", "none", False)
    assert torch.equal(_forward((x, weights, biases)).isnan(), plain.isnan())
    assert torch.equal(_forward((x, weights, biases)).isinf(), plain.isinf())
    weights[1][4, 4] = ones
    plain, _ = reference.forward(x, weights, biases, "relu", "none", False)
    assert torch.equal(_forward((x, weights, biases)).isfinite(), plain.isfinite())


@on_hopper
@pytest.mark.gpu
def test_what_a_call_takes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs(40, (2048, 4096, 2048), BF16)
    want = _forward(inputs)
    assert torch.equal(backend.forward(*inputs, "relu", "none", False)[0], want)
    backend._plans.clear()
    monkeypatch.setattr(driver.Launch, "max_clusters", lambda _: 0)
    for _ in range(2):  # no room for all blocks: another kernel, or PyTorch's ops
        found = backend.forward(*inputs, "relu", "none", False)[0]
        torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)


@on_hopper
@pytest.mark.gpu
def test_streams_that_cannot_be_built_are_refused() -> None:
    inputs = _inputs(8, (1280,) * 3, BF16)
    stream = _stream(inputs)
    with pytest.raises(UnsupportedError, match="shared memory"):
        _forward(inputs, replace(stream, stages=200))
    with pytest.raises(UnsupportedError, match="at once"):
        _forward(inputs, replace(stream, clusters=60))
    with pytest.raises(UnsupportedError, match="16 bytes"):
        _forward(_inputs(8, (1281,) * 3, BF16), stream)
    with pytest.raises(UnsupportedError, match="16-bit"):
        _forward(_inputs(8, (1280,) * 3, torch.float32), stream)
