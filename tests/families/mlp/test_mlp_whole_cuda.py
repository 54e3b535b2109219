"""The whole chain in one CUDA kernel: planning and offline compilation anywhere, rest on Hopper."""

from __future__ import annotations

import shutil
import subprocess
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import NAMES
from fastlinear.core.compare import judge
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.cuda import backend, choice, clusters
from fastlinear.families.mlp.cuda.backend import Config
from fastlinear.families.mlp.problem import problem
from tests.families import nvrtc_offline as offline
from tests.families.hopper_only import on_hopper

CXX = shutil.which("c++")
SHARED_LIMIT = 232_448

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WIDTHS = [
    (64,) * 9,
    (128,) * 9,
    (256,) * 3,
    (512,) * 9,
    (1024,) * 9,
    (784, 256, 10),
    (7, 13, 5),
    (1000, 3),
]
LAYOUTS = {
    "one block": Config(1, 16, 4, 1, unroll=2, depth=4),
    "split k": Config(1, 8, 2, 4, depth=4),
    "cluster 2, stores": Config(2, 8, 4, 2, unroll=2, depth=4),
    "cluster 8, stores, two tiles": Config(8, 16, 2, 2, tiles=2, depth=4),
    "cluster 16, stores, odd groups": Config(16, 16, 3, 2, depth=3),
}
NARROW = (100, 16, 7, 30, 200, 8, 4, 16, 90)
"""Hidden layers of so few columns that most blocks and warps have none, several in a row."""


# ---------------------------------------------------------------- anywhere


def _config(widths: tuple[int, ...], rows: int, itemsize: int, aligned: bool = True) -> Config:
    found = choice.best("clusters", widths, rows, itemsize, aligned)
    assert isinstance(found, Config)
    return found


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 9, 64, 65, 128, 1024])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_what_is_chosen_can_be_built(widths: tuple[int, ...], rows: int, itemsize: int) -> None:
    assert _config(widths, rows, itemsize).invalid(widths, itemsize) is None


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("layers", [1, backend.MAX_LAYERS])
def test_weights_that_may_start_anywhere_are_served(itemsize: int, layers: int) -> None:
    for width in (64, 128, 256, 512, backend.MAX_UNALIGNED):
        widths = (width,) * (layers + 1)
        for rows in (1, 64, 128):
            config = _config(widths, rows, itemsize, aligned=False)
            assert config.invalid(widths, itemsize) is None
            assert config.shared_bytes(widths, itemsize) <= SHARED_LIMIT
            assert not config.direct


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (Config(3, 8, 4, 1), "cluster"),
        (Config(1, 12, 4, 1), "rows"),
        (Config(1, 128, 4, 1), "rows"),
        (Config(1, 8, 16, 2), "warps"),
        (Config(1, 8, 4, 1, depth=1), "depth"),
        (Config(1, 64, 4, 1, tiles=2), "registers"),
        (Config(1, 64, 4, 4, depth=16), "shared memory"),
        (Config(1, 8, 4, 1, simt=True), "float32"),
        (Config(16, 8, 2, 2, direct=True), "equal widths"),
    ],
)
def test_impossible_configs_are_named(config: Config, word: str) -> None:
    assert word in (config.invalid((1024, 1024), 2) or "")


def test_exact_needs_whole_steps_and_passes() -> None:
    config = Config(8, 8, 2, 4, unroll=2)  # 256 of K a step, 256 columns a pass, in 16 bits
    assert config.exact((256, 512, 256), 2)
    assert not config.exact((128, 256), 2)
    assert not config.exact((256, 128), 2)
    assert config.exact((128, 256), 4), "64 bytes of K are 16 float32 numbers"


@pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("config", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shared_memory_and_parameters_agree_with_the_source(
    tmp_path: Path, config: Config, dtype: torch.dtype
) -> None:
    """The host's layout arithmetic against the source's own, computed by a host compiler."""
    widths = (100, 50, 300, 10)
    text = clusters.source(config, widths, dtype, "relu", "none")
    macros = text[: text.index("//")]
    layout = text[text.index("constexpr int ES") : text.index("__device__ __host__ constexpr")]
    file = tmp_path / "layout.cpp"
    file.write_text(
        "#include <cstdio>\n"
        + macros
        + layout
        + 'int main() { std::printf("%d %d", BIAS_OFFSET, (int)sizeof(Params)); }\n'
    )
    subprocess.run([str(CXX), "-std=c++17", "-o", tmp_path / "layout", file], check=True)
    done = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True)
    bias_offset, parameters = map(int, done.stdout.split())
    padded = 64 // dtype.itemsize
    columns = 0
    for n in widths[1:]:
        tiles = -(-n // padded) * padded // 16
        columns += -(-tiles // config.cluster) * 16
    assert config.shared_bytes(widths, dtype.itemsize) == bias_offset + columns * dtype.itemsize
    assert parameters == clusters._PARAM_BYTES


@pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", [name for name, c in LAYOUTS.items() if c.cluster > 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_block_awaits_is_what_the_others_send(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """After every layer: bytes of those blocks that have columns, arrivals of the others."""
    config, itemsize = LAYOUTS[name], dtype.itemsize
    text = clusters.source(config, NARROW, dtype, "relu", "none")
    arithmetic = text[text.index("constexpr int ES") : text.index("typedef uint4 Pieces")]
    layers = len(NARROW) - 1
    file = tmp_path / "bytes.cpp"
    file.write_text(
        "#include <algorithm>\n#include <cstdio>\nusing std::min;\ntypedef unsigned u32;\n"
        "#define __device__\n#define __host__\n#define __forceinline__ inline\n"
        "void mbar_arrive(u32, int);\nvoid mbar_expect(u32, u32);\n"
        + text[: text.index("//")]
        + arithmetic
        + f"int main() {{\n  const int widths[] = {{{', '.join(map(str, NARROW))}}};\n"
        + f"  for (int i = 0; i < {layers}; ++i)\n    for (int r = 0; r < CLUSTER; ++r) {{\n"
        + "      const int k = widths[i], n = widths[i + 1];\n      const Share s(k, n, r);\n"
        + '      std::printf("%d %u %d\\n", s.end - s.first, input_bytes(n), '
        + "sending_blocks(n));\n    }\n}\n"
        + "void mbar_arrive(u32, int) {}\nvoid mbar_expect(u32, u32) {}\n"
    )
    subprocess.run([str(CXX), "-std=c++17", "-o", tmp_path / "bytes", file], check=True)
    done = subprocess.run([tmp_path / "bytes"], check=True, capture_output=True, text=True)
    lines = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    silent = 0
    for layer in range(layers):
        blocks = lines[layer * config.cluster : (layer + 1) * config.cluster]
        sent = [tiles * itemsize * config.rows * 16 for tiles, _, _ in blocks]
        silent += sent.count(0)
        for _, awaited, sending in blocks:
            assert awaited == sum(sent)
            assert sending == config.cluster - sent.count(0)
    assert silent > 0 or config.cluster == 2


@pytest.mark.parametrize(
    ("activation", "final", "layers", "mode"),
    [
        ("silu", "gelu", 3, 1),
        ("relu", "none", 3, 2),
        ("relu", "silu", 3, 3),
        ("silu", "tanh", 3, 4),
        ("silu", "none", 1, 2),
    ],
)
def test_save_mode(activation: str, final: str, layers: int, mode: int) -> None:
    assert clusters.save_mode(activation, final, layers) == mode


def test_reason_not_without_a_device_or_for_what_it_cannot_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reason(rows: int = 64, widths: tuple[int, ...] = (64,) * 3, **kind: object) -> str:
        options = {"dtype": "bfloat16", "device": "cuda"} | kind
        piece = str(options.pop("piece", "forward"))
        return backend.reason_not(problem(piece, rows, widths, **options)) or ""  # type: ignore[arg-type]

    assert "CUDA" in reason(device="cpu")
    assert "forward" in reason(piece="backward")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "9.0" in reason()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert reason() == ""
    assert reason(widths=(7, 1000, 3), rows=1, bias="some", needs_grad=True) == ""
    assert "float64" in reason(dtype="float64")
    assert "rows of x" in reason(x_layout="strided")
    assert "weights" in reason(w_layout="mixed")
    assert "8191" in reason(widths=(8191, 64))
    assert reason(widths=(8192, 64)) == ""
    assert "layers" in reason(widths=(8,) * (backend.MAX_LAYERS + 2))
    assert "empty" in reason(rows=0)
    assert str(backend.MAX_ROWS + 1) in reason(rows=backend.MAX_ROWS + 1)


def test_a_cpu_tensor_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="whole_cuda"):
        backend.forward(torch.ones(2, 8), (torch.ones(8, 8),), (None,), "relu", "none", False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "rows", "dtype", "activation", "final", "save", "vec"),
    [
        (NARROW, 64, torch.bfloat16, "gelu", "none", 2, 2),
        ((784, 256, 64, 256, 784), 64, torch.float32, "relu", "none", 0, 16),
        ((64,) * 9, 64, torch.bfloat16, "relu", "none", 0, 16),
        ((1024,) * 9, 64, torch.bfloat16, "gelu", "none", 2, 16),
        ((1024,) * 9, 64, torch.float32, "gelu", "tanh", 1, 16),
        ((100, 50, 10), 17, torch.float16, "gelu_tanh", "silu", 1, 2),
        ((256,) * 9, 64, torch.float32, "quick_gelu", "sigmoid", 3, 4),
    ],
    ids=str,
)
def test_compiles_without_spills(
    widths: tuple[int, ...],
    rows: int,
    dtype: torch.dtype,
    activation: str,
    final: str,
    save: int,
    vec: int,
) -> None:
    config = _config(widths, rows, dtype.itemsize, vec == 16)
    text = clusters.source(config, widths, dtype, activation, final, save, vec)
    assert offline.usage(text, "whole.cu")["whole_mlp"].frame == 0


# ---------------------------------------------------------------- on a Hopper GPU

Inputs = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor | None, ...]]


def _inputs(rows: int, widths: tuple[int, ...], dtype: torch.dtype, bias: str = "yes") -> Inputs:
    generator = torch.Generator("cuda").manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    weights = tuple((draw(n, k) * (1.5 / k) ** 0.5).to(dtype) for k, n in pairwise(widths))
    biases = tuple(
        (draw(n) * 0.3).to(dtype) if bias == "yes" or (bias == "some" and i % 2 == 0) else None
        for i, n in enumerate(widths[1:])
    )
    return draw(rows, widths[0]).to(dtype), weights, biases


def _assert_right(
    inputs: Inputs,
    activation: str,
    final: str,
    save: bool,
    config: Config | None = None,
) -> None:
    x, weights, biases = inputs
    y, saved = backend.forward(x, weights, biases, activation, final, save, config=config)
    wide_biases = tuple(None if b is None else b.double() for b in biases)
    truth, kept = reference.forward(
        x.double(), tuple(w.double() for w in weights), wide_biases, activation, final, save
    )
    plain, plain_kept = reference.forward(x, weights, biases, activation, final, save)
    assert len(saved) == len(kept)
    pairs = zip((y, *saved), (plain, *plain_kept), (truth, *kept), strict=True)
    for i, (ours, theirs, oracle) in enumerate(pairs):
        assert ours.isfinite().all(), f"{i}: not every element was written"
        verdict = judge(f"y, saved…[{i}]", ours, theirs, oracle)
        assert verdict.passed, str(verdict)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "widths"),
    [
        (1, (64, 64)),
        (64, (64,) * 9),
        (128, (128,) * 4),
        (33, (256,) * 9),
        (64, (512,) * 4),
        (16, (1024,) * 3),
        (5, (1000, 1000, 1000)),
        (17, (784, 256, 10)),
        (33, (7, 13, 5, 31)),
        (9, (36,) * 10),
        (300, (128, 96, 320, 64)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("bias", "save"), [("yes", False), ("some", True), ("no", False)])
def test_shapes(
    dtype: torch.dtype, rows: int, widths: tuple[int, ...], bias: str, save: bool
) -> None:
    _assert_right(_inputs(rows, widths, dtype, bias), "silu" if save else "relu", "none", save)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("config", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("widths", [(256,) * 5, (100, 50, 300, 10)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_of_sharing(config: Config, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = _inputs(21, widths, dtype)
    _assert_right(inputs, "gelu", "none", True, config)
    if dtype == torch.float32:
        _assert_right(inputs, "gelu", "none", True, replace(config, simt=True))


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("config", [*LAYOUTS.values(), None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_and_warps_without_columns(config: Config | None, dtype: torch.dtype) -> None:
    """Again and again, so that one that falls behind is noticed: it would never end."""
    inputs = _inputs(20, NARROW, dtype)
    _assert_right(inputs, "gelu", "none", True, config)
    first, _ = backend.forward(*inputs, "gelu", "none", False, config=config)
    differs = torch.zeros((), device="cuda", dtype=torch.bool)
    for _ in range(300):
        y, _ = backend.forward(*inputs, "gelu", "none", False, config=config)
        differs |= (y != first).any()
    assert not differs


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_activation(activation: str, dtype: torch.dtype) -> None:
    inputs = _inputs(20, (72, 72, 72), dtype)
    _assert_right(inputs, activation, "none", True)
    _assert_right(inputs, "tanh", activation, True)


@on_hopper
@pytest.mark.gpu
def test_layouts_and_alignment() -> None:
    """Strided rows of x, addresses off a 16-byte boundary, biases and weights with strides."""
    x, weights, biases = _inputs(19, (128, 64, 64), torch.bfloat16)
    truth, _ = backend.forward(x, weights, biases, "relu", "none", False)
    wide = torch.full((19, 141), torch.nan, device="cuda", dtype=x.dtype)
    wide[:, 3:131] = x
    odd = tuple(
        torch.empty(w.numel() + 1, device="cuda", dtype=w.dtype)[1:].view_as(w).copy_(w)
        for w in weights
    )
    spread = tuple(torch.stack([b, b * torch.nan], 1)[:, 0] for b in biases if b is not None)
    shifted = tuple(torch.cat([b[:1], b])[1:] for b in biases if b is not None)
    turned = tuple(w.t().contiguous().t() for w in weights)
    for a in (x, wide[:, 3:131], x.t().contiguous().t()):
        for ws in (weights, odd, turned):
            for bs in (biases, spread, shifted):
                y, _ = backend.forward(a, ws, bs, "relu", "none", False)
                torch.testing.assert_close(y, truth)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wide_weights_off_a_16_byte_boundary(dtype: torch.dtype) -> None:
    x, weights, biases = _inputs(9, (1024,) * 3, dtype)
    odd = tuple(
        torch.empty(w.numel() + 1, device="cuda", dtype=dtype)[1:].view_as(w).copy_(w)
        for w in weights
    )
    _assert_right((x, odd, biases), "relu", "none", False)


@on_hopper
@pytest.mark.gpu
def test_changed_weights_are_seen() -> None:
    x, weights, biases = _inputs(8, (256,) * 4, torch.bfloat16)
    backend.forward(x, weights, biases, "relu", "none", False)
    for weight in weights:
        weight.data.mul_(-1.5)
    _assert_right((x, weights, biases), "relu", "none", False)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 256, 512, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ten_thousand_launches_are_bit_equal(width: int, dtype: torch.dtype) -> None:
    x, weights, biases = _inputs(24, (width,) * 5, dtype)
    first, _ = backend.forward(x, weights, biases, "silu", "none", False)
    differs = torch.zeros((), device="cuda", dtype=torch.bool)
    for _ in range(10_000):
        y, _ = backend.forward(x, weights, biases, "silu", "none", False)
        differs |= (y != first).any()
    assert not differs


@on_hopper
@pytest.mark.gpu
def test_first_call_under_capture_and_other_streams() -> None:
    x, weights, biases = _inputs(11, (80, 48, 80), torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = backend.forward(x, weights, biases, "gelu", "none", False)
    x.mul_(0.5)
    graph.replay()
    want, _ = backend.forward(x, weights, biases, "gelu", "none", False)
    assert torch.equal(y, want)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again, _ = backend.forward(x, weights, biases, "gelu", "none", False)
    stream.synchronize()
    assert torch.equal(again, want)


@on_hopper
@pytest.mark.gpu
def test_threads_share_plans() -> None:
    inputs = [_inputs(8, (128,) * 4, torch.bfloat16) for _ in range(4)]
    for i, (x, _, _) in enumerate(inputs):
        x.mul_(i + 1)
    wants = [backend.forward(*args, "relu", "none", False)[0] for args in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(200):
            y, _ = backend.forward(*inputs[i], "relu", "none", False)
            torch.cuda.synchronize()
            if not torch.equal(y, wants[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@on_hopper
@pytest.mark.gpu
def test_nan_and_infinity_go_through() -> None:
    x, weights, biases = _inputs(4, (64,) * 3, torch.bfloat16)
    x[1, 5] = torch.nan
    x[2, 7] = torch.inf
    y, _ = backend.forward(x, weights, biases, "relu", "none", False)
    plain, _ = reference.forward(x, weights, biases, "relu", "none", False)
    assert torch.equal(y.isfinite(), plain.isfinite())
