"""The Triton backend against a float64 oracle: under Triton's CPU interpreter, and on a GPU.

The same comparisons serve both. Triton reads TRITON_INTERPRET when a kernel is defined, so the
interpreted ones run in a process of their own, started by ``test_under_the_interpreter``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.core.compare import Verdict, judge
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
    from fastlinear.families.linear.triton import backend
    from fastlinear.families.linear.triton import product as products
    from fastlinear.families.linear.triton.gemm_config import GemmConfig
    from fastlinear.kernels import row_tiles
    from fastlinear.kernels.triton import sums

    SPLIT = GemmConfig("pointer", 32, 32, 32, 4, 2, splits=3)


pytestmark = pytest.mark.usefixtures("poisoned_triton")
ACTIVATIONS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "none": ("none", lambda x: x),
    "relu": ("output", F.relu),
    "relu2": ("pre", lambda x: F.relu(x).square()),
    "silu": ("pre", F.silu),
    "gelu": ("pre", F.gelu),
    "gelu_tanh": ("pre", lambda x: F.gelu(x, approximate="tanh")),
    "sigmoid": ("output", torch.sigmoid),
    "tanh": ("output", torch.tanh),
    "quick_gelu": ("pre", lambda x: x * torch.sigmoid(1.702 * x)),
    "leaky_relu": ("output", F.leaky_relu),
    "sine": ("pre", torch.sin),
    "softplus": ("output", F.softplus),
    "mish": ("pre", F.mish),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


def draw(
    M: int, K: int, N: int, dtype: torch.dtype, layout: str, bias: bool, seed: int = 0
) -> list[Any]:
    """x (M, K), weight (N, K), bias (N,) or None, dy (M, N), in the named layout."""
    generator = torch.Generator().manual_seed(M * 10007 + K * 101 + N + seed * 1_000_003)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)

    x, weight, dy = normal(M, K), normal(N, K) / max(K, 1) ** 0.5, normal(M, N)
    if layout == "transposed weight":
        weight = weight.t().contiguous().t()
    elif layout == "row-strided x":
        x = normal(M, 2 * K + 3)[:, :K]
    elif layout == "every stride":
        x = normal(3 * K, 2 * M).t()[::2, ::3]
        weight = normal(2 * N, 3 * K)[::2, 1::3] / max(K, 1) ** 0.5
        dy = normal(1, N).expand(M, N)
    elif layout == "transposed x":
        x = normal(K, M).t()
    return [x, weight, normal(N) if bias else None, dy]


def torch_results(
    x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, activation: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """PyTorch's own output and gradients, computed in ``dtype``."""
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in (x, weight)]
    b = None if bias is None else bias.detach().to(dtype).requires_grad_()
    y = ACTIVATIONS[activation][1](F.linear(*leaves, b))
    wanted = [*leaves, *([] if b is None else [b])]
    grads = torch.autograd.grad(y, wanted, dy.to(dtype))
    return dict(zip(("output", "dx", "dW", "db"), (y.detach(), *grads), strict=False))


def our_results(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dy: Tensor,
    activation: str,
    config: Any = None,
    grad_config: Any = None,
) -> dict[str, Tensor]:
    kind = ACTIVATIONS[activation][0]
    y, pre = backend.forward(x, weight, bias, activation, kind == "pre", config=config)
    assert (pre is not None) == (kind == "pre")
    saved = {"none": None, "output": y, "pre": pre}[kind]
    dpre, db = backend.grad_pre(dy, saved, activation, bias is not None)
    ours = {
        "output": y,
        "dx": backend.grad_input(dpre, weight, config=grad_config),
        "dW": backend.grad_weight(dpre, x, config=grad_config),
    }
    return ours if db is None else ours | {"db": db}


def verdicts(
    M: int,
    K: int,
    N: int,
    dtype: torch.dtype,
    activation: str,
    *,
    layout: str = "plain",
    bias: bool = True,
    config: Any = None,
    grad_config: Any = None,
    draws: int = 1,
) -> list[Verdict]:
    """Output and every gradient, judged by the 2x rule, over all draws together."""
    if INTERPRETED:  # a program costs the same whatever its tile: take few
        config = config or GemmConfig("pointer", 64, 64, 64, 4, 2)
        grad_config = grad_config or GemmConfig("pointer", 64, 64, 64, 4, 2)
    pooled: dict[str, list[list[Tensor]]] = {}
    for seed in range(draws):
        inputs = draw(M, K, N, dtype, layout, bias, seed)
        ours = our_results(*inputs, activation, config, grad_config)
        same = torch_results(*inputs, activation, dtype)
        oracle = torch_results(*inputs, activation, torch.float64)
        assert ours.keys() == oracle.keys()
        for name, value in ours.items():
            assert value.dtype is dtype, name
            pooled.setdefault(name, []).append([value, same[name], oracle[name]])
    return [
        judge(name, *(torch.stack(t) for t in zip(*rows, strict=True)))
        for name, rows in pooled.items()
    ]


def check(*args: Any, **options: Any) -> None:
    failed = [str(v) for v in verdicts(*args, **options) if not v.passed]
    assert not failed, "; ".join(failed)


@compares
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_and_dtype(activation: str, dtype: torch.dtype) -> None:
    check(33, 40, 24, dtype, activation)


@compares
@pytest.mark.parametrize(
    ("M", "K", "N"),
    [
        *((1, 1, 1), (1, 33, 7), (7, 1, 65), (7, 65, 33), (65, 7, 1), (33, 33, 65), (65, 300, 9)),
        *((200, 9, 41), (263, 9, 41)),  # db in one launch and in two
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_sizes(M: int, K: int, N: int, dtype: torch.dtype) -> None:
    # A handful of numbers says little about an error: pool draws, where they are quick.
    draws = 1 if INTERPRETED else 16
    check(M, K, N, dtype, "gelu_tanh", draws=draws)
    if dtype is torch.float32:
        check(M, K, N, dtype, "relu", bias=False, draws=draws)


@compares
@pytest.mark.parametrize(
    "layout", ["transposed weight", "row-strided x", "every stride", "transposed x"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    check(33, 65, 40, dtype, "silu", layout=layout)


@compares
@pytest.mark.parametrize("layout", ["plain", "transposed weight", "transposed x"])
@pytest.mark.parametrize("subtile", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_descriptors(layout: str, subtile: int, dtype: torch.dtype) -> None:
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("tensor descriptors need compute capability 9.0")
    config = GemmConfig("tma", 64, 64, 32, 4, 2, subtile=subtile)
    whole, split = replace(config, block_r=128), replace(config, splits=3)
    check(
        72,
        72,
        88,
        dtype,
        "gelu",
        layout=layout,
        config=config,
        grad_config=(whole, split)[subtile - 1],
    )


@compares
def test_splits_of_pointer_products() -> None:
    config = GemmConfig("pointer", 32, 32, 32, 4, 2, splits=3)
    check(150, 40, 33, torch.float32, "tanh", grad_config=config)


SLICES: Any = {"config": SPLIT, "grad_config": SPLIT} if INTERPRETED or ON_GPU else {}


@compares
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu", "leaky_relu"])
def test_slices_of_a_forward(activation: str, dtype: torch.dtype) -> None:
    """Bias, activation and what the backward reads come with the sum of the slices."""
    check(33, 130, 40, dtype, activation, **SLICES)
    check(33, 130, 40, dtype, activation, bias=False, **SLICES)


@compares
@pytest.mark.parametrize(
    "change",
    [
        lambda n, cols, *r: (n - 1, cols, *r),
        lambda n, cols, *r: (n, cols - 1, *r),
        lambda n, cols, s, slices, *r: (n, cols, s, slices - 1, *r),
        lambda *r: tuple("gelu_tanh" if v == "gelu" else v for v in r),
    ],
    ids=["size", "columns of the bias", "slices", "activation"],
)
def test_a_fault_in_the_sum_of_slices_is_seen(
    change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tampered(monkeypatch, "_sum_slices_kernel", change)
    failed = verdicts(33, 130, 40, torch.float32, "gelu", config=SPLIT)
    assert "output" in {v.name for v in failed if not v.passed}


@compares
@pytest.mark.parametrize("sizes", [(64, 64, 64), (36, 68, 132), (132, 4, 72)])
def test_turned_operands(sizes: tuple[int, int, int]) -> None:
    """Gradients of operands that were copied to where their depth is contiguous."""
    m, k, n = sizes
    generator = torch.Generator().manual_seed(m)
    dpre, x, w = (torch.randn(s, generator=generator).to(DEVICE) for s in ((m, n), (m, k), (n, k)))
    for a, b in ((dpre, w), (dpre.t(), x), (dpre.t(), x.t().contiguous().t())):
        out = torch.full((a.shape[0], b.shape[1]), float("nan"), device=DEVICE)
        config = GemmConfig("pointer", 32, 32, 32, 4, 2, splits=2)
        products.Turned(a, b, "none", config).run(a, b, None, out, None)
        verdict = judge("product", out, a @ b, a.double() @ b.double())
        assert verdict.passed, verdict


@compares
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", ["transposed weight", "transposed x"])
def test_turned_operands_of_a_forward(
    layout: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned, run = [], products.Turned.run
    monkeypatch.setattr(products, "_turning_pays", lambda a, b: True)
    monkeypatch.setattr(
        products.Turned, "run", lambda self, *args: turned.append(self) or run(self, *args)
    )
    x, weight, b, _ = draw(36, 68, 132, torch.float32, layout, bias)
    y, pre = backend.forward(x, weight, b, "silu", True)
    assert len(turned) == 1
    plain = F.linear(x, weight, b)
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
    for verdict in (
        judge("pre", pre, plain, exact),
        judge("y", y, F.silu(plain), F.silu(exact)),
    ):
        assert verdict.passed, verdict


@compares
@pytest.mark.parametrize(
    "change",
    [
        lambda rows, *r: (rows - 1, *r),
        lambda rows, cols, *r: (rows, cols - 1, *r),
        lambda rows, cols, stride, *r: (rows, cols, stride + 1, *r),
    ],
    ids=["rows", "columns", "stride"],
)
def test_a_fault_in_turning_is_seen(
    change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tampered(monkeypatch, "_turn_kernel", change)
    monkeypatch.setattr(Tensor, "new_empty", lambda t, *shape, **kind: t.new_zeros(*shape, **kind))
    with pytest.raises(AssertionError):
        test_turned_operands((36, 68, 132))


@compares
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "quick_gelu", "gelu", "gelu_tanh", "sigmoid"])
def test_negative_tails_keep_their_digits(activation: str, dtype: torch.dtype) -> None:
    """Far below zero the value is tiny; a formula like (1 + tanh u) / 2 has nothing left there."""
    x, weight, _, _ = draw(33, 40, 24, dtype, "plain", False)
    for mean in (-4.0, -6.0):
        bias = torch.full((24,), mean, dtype=dtype, device=DEVICE)
        config = GemmConfig("pointer", 64, 64, 64, 4, 2) if INTERPRETED else None
        ours, _ = backend.forward(x, weight, bias, activation, False, config=config)
        value = ACTIVATIONS[activation][1]
        same = value(F.linear(x, weight, bias))
        oracle = value(F.linear(x.double(), weight.double(), bias.double()))
        verdict = judge(f"{activation} at {mean}", ours, same, oracle)
        assert verdict.passed, verdict


@compares
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tanh_keeps_its_digits_near_zero(dtype: torch.dtype) -> None:
    x, w, _, _ = draw(16, 32, 16, dtype, "plain", False)
    x = x * 1e-3
    ours, _ = backend.forward(x, w, None, "tanh", False)
    verdict = judge("y", ours, torch.tanh(F.linear(x, w)), torch.tanh(x.double() @ w.double().t()))
    assert verdict.passed, str(verdict)


@compares
def test_empty_sizes() -> None:
    for M, K, N in ((0, 4, 3), (5, 0, 3), (5, 4, 0)):
        x, w, b, dy = draw(M, K, N, torch.float32, "plain", True)
        y, pre = backend.forward(x, w, b, "gelu", True)
        torch.testing.assert_close(y, F.gelu(F.linear(x, w, b)))
        dpre, db = backend.grad_pre(dy, pre, "gelu", True)
        assert db is not None
        assert db.shape == (N,)
        assert backend.grad_input(dpre, w).shape == (M, K)
        torch.testing.assert_close(backend.grad_weight(dpre, x), dpre.t() @ x)


@compares
def test_non_finite_inputs_stay_so() -> None:
    x, w, b, dy = draw(8, 16, 16, torch.float32, "plain", True)
    x[3, 2] = float("nan")
    for name, (kind, value) in ACTIVATIONS.items():
        y, pre = backend.forward(x, w, b, name, kind == "pre")
        assert torch.equal(torch.isnan(y), torch.isnan(value(F.linear(x, w, b)))), name
        if kind == "pre":
            dpre, _ = backend.grad_pre(dy, pre, name, False)
            assert bool(torch.isnan(dpre[3]).all()) or name == "relu2", name


# ---------------------------------------------------------------------------------------------
# Tests of the tests: each fault must be seen by the comparison above


def tampered(monkeypatch: pytest.MonkeyPatch, kernel: str, change: Callable[..., Any]) -> None:
    """Launch ``kernel`` with its non-tensor arguments passed through ``change``."""
    launch = backend.Launch

    def faulty(target: Any, grid: Any, rest: tuple[Any, ...], *args: Any, **options: Any) -> Any:
        name = getattr(target, "fn", target).__name__
        return launch(target, grid, change(*rest) if name == kernel else rest, *args, **options)

    for module in (backend, products, sums):
        monkeypatch.setattr(module, "Launch", faulty)


FAULTS: dict[str, tuple[str, str, Callable[..., Any], set[str]]] = {
    "row mask": ("gelu", "_gemm_pointer_kernel", lambda m, *r: (m - 1, *r), {"output"}),
    "column mask": ("gelu", "_gemm_pointer_kernel", lambda m, n, *r: (m, n - 1, *r), {"output"}),
    "depth": ("gelu", "_gemm_pointer_kernel", lambda m, n, k, *r: (m, n, k - 1, *r), {"output"}),
    "x strides": (
        "gelu",
        "_gemm_pointer_kernel",
        lambda m, n, k, s, t, *r: (m, n, k, t, s, *r),
        {"output"},
    ),
    "activation": (
        "gelu",
        "_gemm_pointer_kernel",
        lambda *r: tuple("gelu_tanh" if v == "gelu" else v for v in r),
        {"output"},
    ),
    "derivative": (
        "gelu",
        "_grad_pre_kernel",
        lambda *r: tuple("gelu_tanh" if v == "gelu" else v for v in r),
        {"dx", "dW", "db"},
    ),
    "chunk": (
        "gelu",
        "_grad_pre_kernel",
        lambda m, *r: (m - 1, *r),
        {"dx", "dW", "db"},
    ),
    "partial sums": ("gelu", "_sum_rows_kernel", lambda c, *r: (c - 1, *r), {"db"}),
}


@compares
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    activation, kernel, change, broken = FAULTS[fault]
    sizes = (row_tiles._FEW_ROWS + 9 if fault == "partial sums" else 33, 33, 33)
    check(*sizes, torch.float32, activation)
    backend._plans.clear()
    tampered(monkeypatch, kernel, change)
    failed = {v.name for v in verdicts(*sizes, torch.float32, activation) if not v.passed}
    assert broken <= failed


@compares
@pytest.mark.parametrize("fault", [lambda b: None, lambda b: b.roll(1), lambda b: b * 1.03])
def test_a_wrong_bias_is_seen(fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = products.Product.run

    def faulty(self: Any, a: Tensor, b: Tensor, bias: Tensor | None, *rest: Any) -> None:
        run(self, a, b, None if bias is None else fault(bias), *rest)

    monkeypatch.setattr(products.Product, "run", faulty)
    failed = {v.name for v in verdicts(33, 40, 24, torch.bfloat16, "silu") if not v.passed}
    assert "output" in failed


# ---------------------------------------------------------------------------------------------
# On a device only: sizes, capture and offsets the interpreter cannot reach


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestOnDevice:
    pytestmark = gpu

    def test_large(self, activation: str, dtype: torch.dtype) -> None:
        check(1021, 768, 1544, dtype, activation)

    def test_large_transposed_weight(self, activation: str, dtype: torch.dtype) -> None:
        check(2048, 520, 1024, dtype, activation, layout="transposed weight", bias=False)


class TestOnDeviceOnce:
    pytestmark = gpu

    @pytest.mark.parametrize("K", [16, 64, 256, 1024, 4096])
    def test_float32_is_as_accurate_as_torch(self, K: int) -> None:
        assert torch.get_float32_matmul_precision() == "highest"
        check(512, K, 512, torch.float32, "gelu")

    def test_float32_under_high(self) -> None:
        torch.set_float32_matmul_precision("high")
        try:
            check(512, 1024, 512, torch.float32, "gelu")
        finally:
            torch.set_float32_matmul_precision("highest")

    @pytest.mark.parametrize("size", [64, 1024])
    def test_graph_capture_and_determinism(self, size: int) -> None:
        x, w, b, dy = draw(size, 768, 1536, torch.bfloat16, "plain", True)

        def step() -> list[Tensor]:
            return list(our_results(x, w, b, dy, "gelu_tanh").values())

        first = step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for t in captured:
            t.fill_(float("nan"))
        graph.replay()
        for one, other in zip(first, captured, strict=True):
            assert torch.equal(one, other)

    def test_offsets_beyond_32_bits(self) -> None:
        M, K, N = (1 << 20) + 3, 16, 2056
        if torch.cuda.get_device_properties(0).total_memory < 30 << 30:
            pytest.skip("needs 30 GB of device memory")
        x, w, b, _ = draw(M, K, N, torch.bfloat16, "plain", True)
        for config in (None, GemmConfig("pointer", 128, 128, 64, 4, 3)):
            y, pre = backend.forward(x, w, b, "gelu", True, config=config)
            dpre, _ = backend.grad_pre(y, pre, "gelu", True)
            tail = slice(M - 300, M)
            o = F.linear(x[tail].double(), w.double(), b.double())
            t = F.gelu(F.linear(x[tail], w, b))
            verdict = judge("output", y[tail], t, F.gelu(o))
            assert verdict.passed, verdict
            want = torch.ops.aten.gelu_backward(y[tail], pre[tail])
            torch.testing.assert_close(dpre[tail], want, rtol=2e-2, atol=2e-2)
            assert not bool(torch.isnan(y[:: M // 97]).any())
            del y, pre, dpre
