"""CUDA C++ backend of linear_act: pure parts and offline compilation anywhere, rest on Hopper."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import NAMES
from fastlinear.core.compare import judge
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.linear import reference
from fastlinear.families.linear.cuda import gemm
from fastlinear.families.linear.cuda.gemm_config import Config, config_for
from tests.families.hopper_only import on_hopper

NVCC = shutil.which("nvcc")

WIDE = Config(128, 192, 4, out_bufs=3)
CONFIGS = {
    "128x192 cluster 2": WIDE,
    "128x192 cluster 1": Config(128, 192, 5, cluster=1),
    "128x128 cluster 2": Config(128, 128, 6, out_bufs=2),
    "128x128 cluster 1": Config(128, 128, 6, cluster=1, out_bufs=2),
    "128x64 cluster 2": Config(128, 64, 8),
    "128x64 cluster 1": Config(128, 64, 8, cluster=1),
    "64x64 cluster 2": Config(64, 64, 12),
    "64x64 cluster 1": Config(64, 64, 12, cluster=1),
    "cooperative 128x256": Config(128, 256, 4, pingpong=False),
    "cooperative 256x128": Config(256, 128, 4, pingpong=False),
}


# ---------------------------------------------------------------- anywhere


@pytest.mark.parametrize("M", [1, 7, 64, 200, 512, 8192, 100_000])
@pytest.mark.parametrize(("K", "N"), [(768, 3072), (3072, 768), (1024, 4096), (64, 8), (8, 4096)])
def test_config_for_is_always_buildable(M: int, K: int, N: int) -> None:
    for save_pre in (False, True):
        assert config_for(M, K, N, save_pre).invalid() is None


@pytest.mark.parametrize(
    ("sizes", "save", "activation", "tile"),
    [
        ((4096, 4095, 4095), True, "gelu_tanh", (128, 128)),
        ((8192, 770, 3070), True, "gelu_tanh", (128, 192)),
        ((4096, 4095, 4095), False, "none", (128, 256)),
        ((8192, 3070, 770), False, "none", (256, 128)),
        ((3070, 8192, 770), False, "none", (128, 192)),
    ],
)
def test_odd_rows_take_the_tiles_that_were_fastest(
    sizes: tuple[int, int, int], save: bool, activation: str, tile: tuple[int, int]
) -> None:
    config = config_for(*sizes, save, activation)
    assert config.invalid() is None
    assert (config.bm, config.bn) == tile


@pytest.mark.parametrize(
    "config",
    [
        Config(96, 128, 4),
        Config(128, 200, 4),
        Config(128, 256, 4),
        Config(128, 192, 6),
        Config(128, 192, 1),
        Config(128, 192, 4, out_bufs=2),
    ],
)
def test_impossible_configs_are_named(config: Config) -> None:
    assert config.invalid()


def test_reason_not() -> None:
    def reason(
        M: int = 32,
        K: int = 64,
        N: int = 48,
        dtype: torch.dtype = torch.bfloat16,
        xs: tuple[int, int] = (64, 1),
        ws: tuple[int, int] = (64, 1),
        capability: tuple[int, int] | None = (9, 0),
    ) -> str | None:
        return gemm.reason_not(M, K, N, dtype, xs, ws, capability)

    assert reason() is None
    assert reason(dtype=torch.float16) is None
    assert reason(ws=(1, 48)) is None, "a transposed weight is read as it lies"
    assert reason(xs=(72, 1)) is None
    assert reason(M=1, xs=(1, 1)) is None, "the stride of a single row does not matter"
    assert "capability" in (reason(capability=(8, 0)) or "")
    assert "capability" in (reason(capability=(10, 0)) or "")
    assert "CUDA" in (reason(capability=None) or "")
    assert "float32" in (reason(dtype=torch.float32) or "")
    assert reason(N=51) is None, "odd rows of y are written one by one"
    assert "x of shape" in (reason(xs=(65, 1)) or "")
    assert "weight of shape" in (reason(ws=(128, 2)) or "")
    assert "x of shape" in (reason(xs=(0, 1)) or ""), "an expanded row has no stride to follow"
    assert "x of shape" in (reason(xs=(8, 1)) or ""), "rows that overlap"
    assert "empty" in (reason(M=0) or "")
    assert "2^30" in (reason(M=2**31) or "")


def test_registers_are_shared_out_within_the_launch() -> None:
    """setmaxnreg can only hand on what the launch took; asking for more hangs the kernel."""
    text = gemm.source(WIDE, torch.bfloat16, "none", False, False)
    producer, consumer = (
        int(number)
        for number in re.findall(r"setmaxnreg\.(?:dec|inc)\.sync\.aligned\.u32 (\d+)", text)
    )
    assert producer + 2 * consumer <= 3 * (65536 // 384 // 8 * 8)


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("config", "activation", "save_pre", "a_mn", "b_mn", "dtype"),
    [
        (WIDE, "gelu_tanh", False, False, False, torch.bfloat16),
        (WIDE, "gelu_tanh", True, False, False, torch.bfloat16),
        (WIDE, "gelu", True, False, True, torch.float16),
        (WIDE, "none", False, False, False, torch.bfloat16),
        (CONFIGS["128x192 cluster 1"], "none", False, True, True, torch.bfloat16),
        (CONFIGS["128x128 cluster 2"], "none", False, True, True, torch.bfloat16),
        (CONFIGS["cooperative 128x256"], "none", False, True, True, torch.bfloat16),
    ],
)
def test_compiles_without_spills(
    tmp_path: Path,
    config: Config,
    activation: str,
    save_pre: bool,
    a_mn: bool,
    b_mn: bool,
    dtype: torch.dtype,
) -> None:
    file = tmp_path / "gemm.cu"
    file.write_text(gemm.source(config, dtype, activation, True, save_pre, a_mn, b_mn))
    done = subprocess.run(
        [str(NVCC), "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v"]
        + ["-cubin", "-o", str(tmp_path / "gemm.cubin"), str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = done.stdout + done.stderr
    assert re.findall(r"(\d+) bytes spill", report) == ["0", "0"], report
    assert "serialized" not in report, report


# ---------------------------------------------------------------- on a Hopper GPU


def _inputs(
    M: int, K: int, N: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    return draw(M, K).to(dtype), (draw(N, K) / K**0.5).to(dtype), draw(N).to(dtype)


def _assert_matches(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, y: Tensor, pre: Tensor | None
) -> None:
    wide_bias = None if bias is None else bias.double()
    oracle = reference.forward(x.double(), weight.double(), wide_bias, activation, True)
    plain = reference.forward(x, weight, bias, activation, True)
    for name, ours, theirs, truth in zip(("y", "pre"), (y, pre), plain, oracle, strict=True):
        if ours is not None:
            assert ours.isfinite().all(), f"{name}: not every element was written"
            verdict = judge(name, ours, theirs, truth)
            assert verdict.passed, str(verdict)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(
    ("M", "K", "N"),
    [
        (1, 8, 8),
        (1, 768, 3072),
        (129, 72, 200),
        (257, 776, 1000),
        (2048, 768, 1544),
        (20_000, 8, 1160),  # many tiles a block, each of a single step along K
    ],
)
@pytest.mark.parametrize("save_pre", [False, True])
def test_every_config_with_tails(config: Config, M: int, K: int, N: int, save_pre: bool) -> None:
    x, weight, bias = _inputs(M, K, N)
    y, pre = gemm.gemm(x, weight, bias, "gelu_tanh", save_pre, config)
    _assert_matches(x, weight, bias, "gelu_tanh", y, pre)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_every_activation(activation: str, dtype: torch.dtype, has_bias: bool) -> None:
    x, weight, bias = _inputs(300, 264, 520, dtype)
    y, pre = gemm.forward(x, weight, bias if has_bias else None, activation, True)
    _assert_matches(x, weight, bias if has_bias else None, activation, y, pre)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", NAMES)
def test_extreme_values(activation: str) -> None:
    """Large arguments neither overflow to NaN nor lose their limit; NaN and infinities as torch."""
    inf, nan = float("inf"), float("nan")
    values = [-3e4, -200.0, -30.0, -1e-3, -0.0, 0.0, 1e-3, 30.0, 200.0, 3e4, nan, inf, -inf]
    x = torch.zeros(16, 64, device="cuda", dtype=torch.bfloat16)
    x[: len(values), 0] = torch.tensor(values)
    weight = torch.zeros(8, 64, device="cuda", dtype=torch.bfloat16)
    weight[:, 0] = 1
    y, _ = gemm.forward(x, weight, None, activation, False)
    truth = reference.linear_act(x[:, :1].double(), weight[:, :1].double(), None, activation)
    torch.testing.assert_close(y.double(), truth, rtol=1e-2, atol=2e-5, equal_nan=True)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", NAMES)
def test_every_value_of_the_activation(activation: str) -> None:
    """Element by element in float16, on pre-activations that are exact."""
    x = torch.zeros(4096, 8, device="cuda", dtype=torch.float16)
    x[:, 0] = torch.linspace(-9, 9, 4096)
    weight = torch.zeros(8, 8, device="cuda", dtype=torch.float16)
    weight[:, 0] = 1
    y, _ = gemm.forward(x, weight, None, activation, False)
    truth = reference.linear_act(x.double(), weight.double(), None, activation)
    torch.testing.assert_close(y.double(), truth, rtol=7e-4, atol=1e-6)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_layouts(config: Config) -> None:
    """Either operand transposed, rows strided, addresses off a 16-byte boundary."""
    M, K, N = 264, 328, 520
    x, weight, bias = _inputs(M, K, N)
    padded = torch.full((M, K + 40), torch.nan, device="cuda", dtype=x.dtype)
    strided = padded[:, 8 : K + 8]
    strided.copy_(x)
    odd = torch.empty(N * K + 1, device="cuda", dtype=x.dtype)[1:].view(N, K).copy_(weight)
    every_second = torch.stack([bias, bias * torch.nan], 1)[:, 0]
    for a in (x, strided, x.t().contiguous().t()):
        for b in (weight, odd, weight.t().contiguous().t()):
            y, pre = gemm.gemm(a, b, every_second, "silu", True, config)
            _assert_matches(x, weight, bias, "silu", y, pre)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("sizes", [(300, 72, 521), (129, 264, 63), (1, 8, 1), (700, 1000, 450)])
def test_odd_rows_of_the_result(config: Config, sizes: tuple[int, int, int]) -> None:
    """Rows of y that begin anywhere, with either operand transposed, and nothing beside them."""
    M, K, N = sizes
    x, weight, bias = _inputs(M, K, N)
    wide = torch.nn.functional.pad(weight, (0, 0, 0, -N % 8)).t().contiguous().t()[:N]
    for b in (weight, wide):
        for bias_now, activation in ((bias, "gelu_tanh"), (bias, "relu"), (None, "gelu")):
            torch.full((M * N,), torch.nan, device="cuda", dtype=x.dtype)
            y, pre = gemm.gemm(x, b, bias_now, activation, True, config)
            _assert_matches(x, weight, bias_now, activation, y, pre)
            assert y.is_contiguous()
            plain, _ = gemm.gemm(x, b, bias_now, activation, False, config)
            assert torch.equal(plain, y)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_repeated_runs_are_bit_equal_and_write_everything(config: Config) -> None:
    x, weight, bias = _inputs(4000, 1096, 1160)
    first, first_pre = gemm.gemm(x, weight, bias, "gelu", True, config)
    assert first_pre is not None
    for _ in range(200):
        torch.full_like(first, torch.nan)  # leaves NaN in the block the allocator hands out next
        y, pre = gemm.gemm(x, weight, bias, "gelu", True, config)
        assert pre is not None
        assert torch.equal(y, first)
        assert torch.equal(pre, first_pre)


@on_hopper
@pytest.mark.gpu
def test_graph_capture_and_new_addresses() -> None:
    x, weight, bias = _inputs(512, 256, 384)
    gemm.forward(x, weight, bias, "gelu_tanh", True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, pre = gemm.forward(x, weight, bias, "gelu_tanh", True)
    other_x, other_weight, other_bias = _inputs(512, 256, 384, seed=1)
    expected = gemm.forward(other_x, other_weight, other_bias, "gelu_tanh", True)
    x.copy_(other_x)
    weight.copy_(other_weight)
    bias.copy_(other_bias)
    graph.replay()
    assert pre is not None
    assert expected[1] is not None
    assert torch.equal(y, expected[0])
    assert torch.equal(pre, expected[1])


@on_hopper
@pytest.mark.gpu
def test_each_launch_waits_for_the_kernel_before() -> None:
    """Launches may begin under the end of the one before, whose output they read."""
    _, weight, _ = _inputs(1, 1024, 1024)
    start = _inputs(2048, 1024, 8)[0]

    def chain(wait: bool) -> Tensor:
        x = start * 1
        for _ in range(6):
            x, _ = gemm.forward(x, weight, None, "relu", False)
            if wait:
                torch.cuda.synchronize()
        return x + 0

    expected = chain(wait=True)
    assert all(torch.equal(chain(wait=False), expected) for _ in range(50))
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(wait=False)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            doubled = y * 2
        torch.cuda.current_stream().wait_stream(side)
        joined, _ = gemm.forward(doubled, weight, None, "relu", False)
    after, _ = gemm.forward(expected * 2, weight, None, "relu", False)
    for _ in range(50):
        y.fill_(torch.nan)
        joined.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)
        assert torch.equal(joined, after)


@on_hopper
@pytest.mark.gpu
def test_uses_the_current_stream() -> None:
    x, weight, bias = _inputs(1024, 1024, 1024)
    expected, _ = gemm.forward(x, weight, bias, "relu", False)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late = x.clone().zero_().add_(x)
        y, _ = gemm.forward(late, weight, bias, "relu", False)
    side.synchronize()
    assert torch.equal(y, expected)


@on_hopper
@pytest.mark.gpu
def test_first_call_inside_a_capture() -> None:
    """Compiling and loading are no part of the graph, and do not end its capture."""
    x, weight, bias = _inputs(40, 136, 264)
    torch.cuda.synchronize()
    gemm._plans.clear()
    gemm._kernels.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = gemm.forward(x, weight, bias, "quick_gelu", False)
    graph.replay()
    _assert_matches(x, weight, bias, "quick_gelu", y, None)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("warm", [True, False])
def test_a_thread_that_never_called_cuda(warm: bool) -> None:
    x, weight, bias = _inputs(64, 128, 256)
    expected, _ = gemm.forward(x, weight, bias, "silu", False)
    torch.empty_like(expected)  # leaves a block for the thread to reuse
    if not warm:
        gemm._plans.clear()
    with ThreadPoolExecutor(1) as pool:
        y, _ = pool.submit(gemm.forward, x, weight, bias, "silu", False).result()
    assert torch.equal(y, expected)


@on_hopper
@pytest.mark.gpu
def test_tanh_keeps_its_digits_near_zero() -> None:
    x, weight, _ = _inputs(64, 128, 256)
    y, pre = gemm.forward(x * 1e-3, weight, None, "tanh", True)
    _assert_matches(x * 1e-3, weight, None, "tanh", y, pre)


@on_hopper
@pytest.mark.gpu
def test_refuses_with_the_reason() -> None:
    x, weight, bias = _inputs(16, 64, 24)
    with pytest.raises(UnsupportedError, match="x of shape"):
        gemm.forward(x[:, :60].contiguous(), weight[:, :60].contiguous(), bias, "relu", False)
    with pytest.raises(UnsupportedError, match="float32"):
        gemm.forward(x.float(), weight.float(), None, "relu", False)
    with pytest.raises(UnsupportedError, match="accumulators"):
        gemm.gemm(x, weight[:16], None, config=Config(128, 256, 4))
