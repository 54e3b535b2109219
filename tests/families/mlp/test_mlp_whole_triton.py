"""Backend ``whole`` in Triton against a float64 oracle: under Triton's CPU interpreter, on a GPU.

The same comparisons serve both. Triton reads TRITON_INTERPRET when a kernel is defined, so the
interpreted ones run in a process of their own, started by ``test_under_the_interpreter``.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import NAMES
from fastlinear.core.compare import Verdict, judge
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.problem import problem
from fastlinear.families.mlp.triton import backend, plans
from fastlinear.families.mlp.triton.backend import WholeConfig
from tests.families.interpreted import DEVICE, compares, gpu, run_interpreted, starts_it

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL_PARTS = WholeConfig(16, 4, chunk=32, ahead=2)
RESIDENT = WholeConfig(32, 4, resident=3, per_unit=1, chunk=32)


@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Results start as NaN, so an element that is never written is seen; no plans are kept."""
    empty = plans._empty
    monkeypatch.setattr(plans, "_empty", lambda *a: empty(*a).fill_(float("nan")))
    backend._plans.clear()
    yield
    backend._plans.clear()


def draw(M: int, widths: tuple[int, ...], dtype: torch.dtype, biases: str = "yes") -> list[Any]:
    """x (M, n_0), weights (n_{i+1}, n_i), biases (n_{i+1},) or None, dy (M, n_L)."""
    generator = torch.Generator().manual_seed(M * 101 + sum(widths))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)

    pairs = list(itertools.pairwise(widths))
    weights = tuple(normal(n, k) * (2 / k) ** 0.5 for k, n in pairs)
    chosen = {"yes": lambda i: True, "no": lambda i: False, "some": lambda i: i % 2 == 0}[biases]
    bs = tuple(normal(n) * 0.5 if chosen(i) else None for i, (_, n) in enumerate(pairs))
    return [normal(M, widths[0]), weights, bs, normal(M, widths[-1])]


def everything(weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> Any:
    return (True, (True,) * len(weights), tuple(b is not None for b in biases))


def flat(y: Tensor, grads: Any) -> dict[str, Tensor]:
    named = {"y": y, "dx": grads[0]}
    named |= {f"dW{i}": t for i, t in enumerate(grads[1])}
    named |= {f"db{i}": t for i, t in enumerate(grads[2])}
    return {name: t for name, t in named.items() if t is not None}


def expected(
    inputs: list[Any], activation: str, final: str, dtype: torch.dtype, needs: Any
) -> dict[str, Tensor]:
    """The reference's output and gradients, computed in ``dtype``."""

    def cast(t: Tensor | None) -> Any:
        return None if t is None else t.to(dtype)

    x, weights, biases, dy = inputs
    weights = tuple(map(cast, weights))
    y, saved = reference.forward(
        cast(x), weights, tuple(map(cast, biases)), activation, final, True
    )
    return flat(y, reference.backward(cast(dy), cast(x), weights, saved, activation, final, needs))


def ours(
    inputs: list[Any],
    activation: str,
    final: str,
    needs: Any,
    config: WholeConfig | None,
    *,
    repeats: bool = True,
) -> dict[str, Tensor]:
    """Output and gradients; ``repeats``: a call that stores nothing must give the same output."""
    x, weights, biases, dy = inputs
    y, saved = backend.forward(x, weights, biases, activation, final, True, config=config)
    assert len(saved) == len(weights)
    assert [t.shape for t in saved] == [(x.shape[0], w.shape[0]) for w in weights]
    alone, nothing = backend.forward(x, weights, biases, activation, final, False, config=config)
    assert nothing == ()
    assert not repeats or torch.equal(alone.nan_to_num(), y.nan_to_num())
    grads = backend.backward(dy, x, weights, saved, activation, final, needs, config=config)
    return flat(y, grads)


def verdicts(
    M: int,
    widths: tuple[int, ...],
    dtype: torch.dtype,
    activation: str,
    final: str,
    *,
    biases: str = "yes",
    config: WholeConfig | None = None,
    change: Callable[[list[Any]], list[Any]] = lambda inputs: inputs,
    repeats: bool = True,
) -> list[Verdict]:
    """Output and every gradient, judged by the 2x rule."""
    inputs = change(draw(M, widths, dtype, biases))
    needs = everything(inputs[1], inputs[2])
    mine = ours(inputs, activation, final, needs, config, repeats=repeats)
    same = expected(inputs, activation, final, dtype, needs)
    oracle = expected(inputs, activation, final, torch.float64, needs)
    assert mine.keys() == oracle.keys()
    return [judge(name, t, same[name], oracle[name]) for name, t in mine.items()]


def check(*args: Any, **options: Any) -> None:
    failed = [str(v) for v in verdicts(*args, **options) if not v.passed]
    assert not failed, "; ".join(failed)


@compares
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", NAMES)
def test_every_activation_and_dtype(activation: str, dtype: torch.dtype) -> None:
    check(15, (24, 40, 16), dtype, activation, activation)


@compares
def test_one_layer_of_one_feature() -> None:
    inputs = draw(40, (1, 1), torch.float32)
    needs = everything(inputs[1], inputs[2])
    mine = ours(inputs, "relu", "gelu", needs, None)
    for name, t in expected(inputs, "relu", "gelu", torch.float64, needs).items():
        torch.testing.assert_close(mine[name].double(), t, atol=1e-5, rtol=1e-5)


@compares
@pytest.mark.parametrize("widths", [(3, 65, 17, 10), (100, 33, 128)])
@pytest.mark.parametrize("biases", ["yes", "no", "some"])
def test_widths(widths: tuple[int, ...], biases: str) -> None:
    check(33, widths, torch.float32, "tanh", "gelu", biases=biases)
    check(33, widths, torch.bfloat16, "relu", "none", biases=biases)


@compares
@pytest.mark.parametrize("config", [SMALL_PARTS, RESIDENT], ids=["parts", "weight_stationary"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_configurations(config: WholeConfig, dtype: torch.dtype) -> None:
    check(70, (37, 50, 40, 20), dtype, "silu", "tanh", config=config)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("M", [10_000, 40_000, 70_001])
@pytest.mark.parametrize(
    "widths",
    [(3, 128, 100, 1), (16, 65, 80, 9), (8, 64, 64, 8), (20, 128, 96, 32), (33, 128, 128, 40)],
    ids=str,
)
def test_many_rows(widths: tuple[int, ...], M: int) -> None:
    """Ends narrower than the parts that are added up for them."""
    check(M, widths, torch.bfloat16, "gelu", "none", repeats=False)


@compares
def test_tf32_operands_are_rounded_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "matmul_precision", lambda dtype: "high")
    inputs = draw(40, (64, 1), torch.float32, "no")
    x, (w,), biases, _ = inputs
    y, _ = backend.forward(x, (w,), biases, "none", "none", False)

    def rounded(t: Tensor) -> Tensor:
        return ((t.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32).double()

    torch.testing.assert_close(y.double(), rounded(x) @ rounded(w).t(), atol=2e-6, rtol=2e-6)
    distance = (y.double() - x.double() @ w.double().t()).abs().max()
    assert 1e-5 < float(distance) < 1e-2


@compares
def test_more_layers_than_one_launch_unrolls() -> None:
    layers = plans._MAX_LAYERS + 3
    for activation, final in (("silu", "none"), ("relu", "tanh")):
        check(18, (16,) * (layers + 1), torch.float16, activation, final)


@compares
@pytest.mark.parametrize(
    "layout", ["row-strided x", "transposed x", "transposed W", "strided bias", "expanded dy"]
)
def test_layouts(layout: str) -> None:
    def change(inputs: list[Any]) -> list[Any]:
        x, weights, biases, dy = inputs
        if layout == "row-strided x":
            x = torch.cat([x, x], 1)[:, : x.shape[1]]
        elif layout == "transposed x":
            x = x.t().contiguous().t()
        elif layout == "transposed W":
            weights = tuple(w.t().contiguous().t() for w in weights)
        elif layout == "strided bias":
            biases = tuple(torch.stack([b, b], 1)[:, 0] for b in biases)
        else:
            dy = dy[:1].expand_as(dy)
        return [x, weights, biases, dy]

    check(33, (20, 40, 24), torch.float32, "silu", "none", change=change)


@compares
def test_only_what_is_needed() -> None:
    inputs = draw(20, (16, 24, 24, 8), torch.float32)
    whole = everything(inputs[1], inputs[2])
    full = expected(inputs, "relu", "none", torch.float32, whole)
    for needs in (
        (True, (False,) * 3, (False,) * 3),
        (False, (False, True, False), (False, False, False)),
        (False, (False, False, False), (False, False, True)),
        (False, (False,) * 3, (False,) * 3),
        (True, (False, True, False), (True, False, False)),
    ):
        mine = ours(inputs, "relu", "none", needs, None)
        wanted = expected(inputs, "relu", "none", torch.float32, needs)
        assert mine.keys() == wanted.keys()
        for name, t in mine.items():
            torch.testing.assert_close(t, full[name], msg=name)


@compares
def test_no_rows() -> None:
    inputs = draw(0, (16, 24, 8), torch.float32)
    needs = everything(inputs[1], inputs[2])
    mine = ours(inputs, "gelu", "none", needs, None)
    for name, t in expected(inputs, "gelu", "none", torch.float32, needs).items():
        assert torch.equal(mine[name], t), name


@compares
def test_weights_changed_between_calls_are_seen() -> None:
    x, weights, biases, _ = draw(9, (16, 24, 8), torch.float32)
    for _ in range(3):
        y, _ = backend.forward(x, weights, biases, "relu", "none", False)
        want, _ = reference.forward(x, weights, biases, "relu", "none", False)
        torch.testing.assert_close(y, want)
        weights[0].data.mul_(-1.5)
        weights = (weights[0], weights[1].clone() + 1)


@compares
def test_non_finite_rows_stay_apart() -> None:
    inputs = draw(8, (20, 24, 24, 7), torch.float32)
    inputs[0][3, 2] = float("nan")
    inputs[0][5, 1] = float("inf")
    for activation in ("relu", "sigmoid", "silu"):
        y, _ = backend.forward(*inputs[:3], activation, "none", False)
        want, _ = reference.forward(*inputs[:3], activation, "none", False)
        assert torch.equal(torch.isnan(y), torch.isnan(want)), activation


# ---------------------------------------------------------------------------------------------
# Tests of the tests: each fault must be seen by the comparison above


def _fault(kernel: str, position: int, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """``plans._launch`` with one of a kernel's non-tensor arguments changed."""
    launch = plans._launch

    def faulty(name: str, grid: Any, rest: tuple[Any, ...], *args: Any) -> Any:
        if name == kernel:
            rest = (*rest[:position], change(rest[position]), *rest[position + 1 :])
        return launch(name, grid, rest, *args)

    return faulty


FAULTS: dict[str, tuple[str, int, Callable[[Any], Any], set[str]]] = {
    "rows": ("_mlp_fwd_kernel", 0, lambda m: m - 1, {"y"}),
    "x stride": ("_mlp_fwd_kernel", 1, lambda s: s + 1, {"y"}),
    "input width": ("_mlp_fwd_kernel", 5, lambda w: (w[0] - 1, *w[1:]), {"y"}),
    "final": ("_mlp_fwd_kernel", 13, lambda a: "none", {"y"}),
    "gradient rows": ("_mlp_bwd_dx_kernel", 0, lambda m: m - 1, {"dx", "dW0", "db0"}),
    "derivative": ("_mlp_bwd_dx_kernel", 12, lambda a: "gelu_tanh", {"dx", "dW0", "db0"}),
    "slices": ("_mlp_bwd_dw_kernel", 2, lambda r: r // 2, {"dW0", "db2"}),
    "input's activation": ("_mlp_bwd_dw_kernel", 6, lambda a: "gelu_tanh", {"dW1", "dW2"}),
    "sum": ("_mlp_sum_parts_kernel", 1, lambda p: p - 1, {"dW0", "dW2", "db1"}),
}


@compares
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, position, change, broken = FAULTS[fault]
    case = (150, (40, 24, 40, 20), torch.float32, "gelu", "tanh")
    check(*case)
    backend._plans.clear()
    monkeypatch.setattr(plans, "_launch", _fault(kernel, position, change))
    # what a faulty kernel reads from foreign memory differs from call to call
    failed = {v.name for v in verdicts(*case, repeats=False) if not v.passed}
    assert broken <= failed


@compares
def test_a_wrong_bias_is_seen() -> None:
    inputs = draw(30, (16, 24, 8), torch.bfloat16)
    needs = everything(inputs[1], inputs[2])
    wrong = [*inputs[:2], tuple(b.roll(1) for b in inputs[2]), inputs[3]]
    mine = ours(wrong, "relu", "none", needs, None)
    same = expected(inputs, "relu", "none", torch.bfloat16, needs)
    oracle = expected(inputs, "relu", "none", torch.float64, needs)
    assert not judge("y", mine["y"], same["y"], oracle["y"]).passed


# ---------------------------------------------------------------------------------------------
# Without a kernel


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "cpu"}, "CUDA devices only"),
        ({"dtype": "float64"}, "float64"),
        ({"widths": (64, 2 * backend.MAX_WIDTH, 64)}, "more than the"),
        ({"widths": (64, 0, 64)}, "width of 0"),
        ({"m": 2**30}, "2^30 rows"),
        ({"m": 65536, "dtype": "float32", "precision": "highest"}, "so many rows"),
        ({"dtype": "float32", "precision": "highest"}, None),
        ({}, None),
    ],
)
def test_reason_not(
    change: dict[str, Any], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    call: dict[str, Any] = {"m": 64, "widths": (64, 128, 10), "dtype": "bfloat16", "device": "cuda"}
    call |= change
    why = backend.reason_not(problem("forward", call.pop("m"), call.pop("widths"), **call))
    assert (why is None) == (words is None)
    assert (words or "") in (why or "")


def test_import_is_light() -> None:
    code = "import sys, fastlinear.families.mlp.triton.backend; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------------------------------
# On a device only


class TestOnDevice:
    pytestmark = gpu

    @pytest.mark.parametrize("H", [64, 128])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_large(self, H: int, dtype: torch.dtype) -> None:
        check(40_001, (H,) * 4, dtype, "relu", "none")
        check(3_001, (H, H - 3, H), dtype, "gelu_tanh", "silu")

    def test_float32_error_is_at_most_torchs(self) -> None:
        for H in (16, 32, 64, 128):
            inputs = draw(4096, (H,) * 5, torch.float32)
            needs = (False, (False,) * 4, (False,) * 4)
            mine = ours(inputs, "relu", "none", needs, None)["y"]
            same = expected(inputs, "relu", "none", torch.float32, needs)["y"]
            oracle = expected(inputs, "relu", "none", torch.float64, needs)["y"]
            assert judge("y", mine, same, oracle, factor=1.1).passed

    def test_repeated_launches_agree(self) -> None:
        inputs = draw(5000, (64,) * 5, torch.bfloat16)
        needs = everything(inputs[1], inputs[2])
        first = ours(inputs, "silu", "none", needs, None)
        for _ in range(200):
            again = ours(inputs, "silu", "none", needs, None)
            assert all(torch.equal(again[name], t) for name, t in first.items())

    def test_under_capture(self) -> None:
        x, weights, biases, _ = draw(64, (64,) * 4, torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = backend.forward(x, weights, biases, "relu", "none", False)
        for w in weights:
            w.mul_(0.5)
        graph.replay()
        want, _ = backend.forward(x, weights, biases, "relu", "none", False)
        assert torch.equal(y, want)
