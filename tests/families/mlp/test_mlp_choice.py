"""What a chain takes where nothing is measured, and where fast products are allowed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastlinear as fl
from benchmarks.harness.rows import read_rows
from fastlinear.activations.reference import NAMES
from fastlinear.core.problem import Problem
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import family
from fastlinear.families.linear.cpu import gemm
from fastlinear.families.mlp import backends, reference
from fastlinear.families.mlp.problem import problem
from fastlinear.families.mlp.selection import choices_of
from fastlinear.native import cpp_build

ROOT = Path(__file__).parents[3]
needs_compiler = pytest.mark.skipif(cpp_build.reason_not() is not None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def unmeasured() -> Iterator[None]:
    """A tuned cache of the test's own, empty."""
    with cache.in_memory():
        yield


def chain(m: int, width: int, layers: int = 2, grad: bool = False) -> Problem:
    return problem(
        "forward",
        m,
        (width,) * (layers + 1),
        dtype="float32",
        device="cpu",
        activation="relu",
        final_activation="relu",
        precision="highest",
        needs_grad=grad,
    )


def measured(p: Problem, best: str) -> None:
    able = [b for b in family("mlp").candidates(p.piece) if b.reason_not(p) is None]
    cache.store(p, able, best, {b.name: 2.0 - (b.name == best) for b in able})


def defaults_are(expected: dict[tuple[int, int, bool], str]) -> None:
    """Forwards of (rows, width, with gradients) take these backends unmeasured."""
    for (m, width, grad), name in expected.items():
        forward = choices_of(chain(m, width, grad=grad))[0]
        assert (forward.backend.name, forward.source) == (name, "default"), (m, width, grad)


@needs_compiler
def test_the_order_where_layers_have_products_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer where they gain more than a chain does: in training, and of many rows."""
    monkeypatch.setattr(gemm, "pays", lambda layer: True)
    monkeypatch.setattr(backends, "is_wide_amd", lambda: False)
    expected = {
        (64, 1024, True): "layerwise",
        (512, 1024, True): "layerwise",
        (600, 1024, True): "eager",
        (64, 1024, False): "whole_cpp",
        (256, 1024, False): "layerwise",
    }
    defaults_are(expected)


@needs_compiler
def test_the_order_on_processors_of_512_bits_by_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is ours of any size but the smallest: PyTorch's products run at half of the rate."""
    monkeypatch.setattr(backends, "is_wide_amd", lambda: True)
    expected = {
        (64, 1024, True): "whole_cpp",
        (1024, 1024, True): "layerwise",
        (1, 64, True): "eager",
        (64, 1024, False): "whole_cpp",
        (512, 512, False): "whole_cpp",
        (1024, 1024, False): "layerwise",
    }
    defaults_are(expected)


@needs_compiler
def test_the_order_without_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own ops are left to sizes nobody else serves."""
    monkeypatch.setattr(gemm, "pays", lambda layer: False)
    expected = {
        (2, 4096): "whole_cpp",
        (16, 4096): "whole_cpp",
        (20, 4096): "whole_cpp",
        (128, 4096): "whole_cpp",
        (20, 10000): "layerwise",
        (128, 2048): "whole_cpp",
        (200, 512): "whole_cpp",
        (200, 1024): "whole_cpp",
        (512, 1024): "whole_cpp",
        (600, 1024): "layerwise",
        (200, 4096): "layerwise",
        (8192, 256): "whole_cpp",
        (8192, 512): "layerwise",
    }
    for (m, width), name in expected.items():
        (choice,) = choices_of(chain(m, width))
        assert (choice.backend.name, choice.source) == (name, "default"), (m, width)


@needs_compiler
def test_the_order_of_a_cpu_is_close_to_the_best_in_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind the best forced backend by 0.7% at most in the geometric mean of each processor's
    cells, and by 0.5% in that of all."""
    monkeypatch.setattr(gemm, "pays", lambda layer: False)  # as where the rows were taken
    losses: dict[str, list[float]] = {}
    for path in sorted((ROOT / "results").glob("*/overhead.jsonl.gz")):
        cells: dict[Problem, dict[str, float]] = {}
        for row in read_rows(path):
            case = row["case"]
            if case["device"] == "cpu" and row["valid"] and case["direction"] == "forward":
                p = chain(case["dims"]["M"], case["dims"]["H"], case["dims"]["L"])
                cells.setdefault(p, {})[row["contender"]] = row["median_us"]
        for p, times in cells.items():
            forced = {n: times[f"fastlinear[{n}]"] for n in ("layerwise", "whole_cpp")}
            forced["eager"] = times["eager"]
            (choice,) = choices_of(p)
            loss = math.log(forced[choice.backend.name] / min(forced.values()))
            losses.setdefault(path.parent.name, []).append(loss)
    assert sorted(map(len, losses.values())) == [225, 262, 262]
    behind = {name: math.exp(statistics.fmean(found)) for name, found in losses.items()}
    assert max(behind.values()) < 1.007, behind
    assert math.exp(statistics.fmean(x for found in losses.values() for x in found)) < 1.005


@pytest.mark.parametrize("final", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_own_ops_without_gradients(final: str, dtype: torch.dtype) -> None:
    """Activations in place: the numbers of the chain with gradients, and no argument is touched."""
    x, w = torch.randn(5, 6, dtype=dtype), torch.randn(6, 6, dtype=dtype, requires_grad=True)
    b = torch.randn(6, dtype=dtype)
    before = [t.detach().clone() for t in (x, w, b)]
    with torch.no_grad():
        y = fl.mlp(x, (w, w), (b, None), activation=final, final_activation=final, backend="eager")
        expected = reference.mlp(x, (w, w), (b, None), final, final)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    assert not y.requires_grad
    assert all(torch.equal(t, kept) for t, kept in zip((x, w, b), before, strict=True))
    assert y.data_ptr() not in {t.data_ptr() for t in (x, w, b)}
    other = fl.mlp(x, (w, w), (b, None), activation=final, final_activation=final, backend="eager")
    torch.testing.assert_close(other, expected, rtol=0, atol=0)
    other.sum().backward()
    assert w.grad is not None


@pytest.mark.parametrize(
    ("m", "widths", "captured", "gains"),
    [
        (64, (4096,) * 3, True, True),
        (128, (4096,) * 3, True, False),
        (128, (4096,) * 3, False, True),
        (128, (4096,) * 9, True, True),
        (129, (4096,) * 9, True, False),
        (64, (1024, 4096, 1024), True, False),
        (64, (1024, 4096, 1024), False, True),
        (64, (2048, 4096, 2048, 10), True, True),
    ],
)
def test_wide_16_bit_chains_stream_where_that_gains(
    m: int, widths: tuple[int, ...], captured: bool, gains: bool
) -> None:
    p = problem("forward", m, widths, dtype="bfloat16", device="cuda", captured=captured)
    assert (family("mlp").prefer(p)[0] == "whole_cuda") is gains
