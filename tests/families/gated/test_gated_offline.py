"""The Triton kernels compile for each architecture, without spilling, on a machine without a GPU.

Launches are built from meta tensors, so what is compiled is what would be launched.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.families.gated.stacking import ORDERS, Biases, Pre, Weights
from fastlinear.families.gated.triton import backend, config
from fastlinear.kernels.triton import sums
from tests.families.triton_offline import FLOATS, Recorded, assert_fits, recorder

ARCHS = (80, 90, 100)
UNITS = 132


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Launches made while the test runs; none is carried out."""
    made: list[Recorded] = []
    for module in (backend, sums):
        monkeypatch.setattr(module, "Launch", recorder(made))
    monkeypatch.setattr(backend, "units_of", lambda device: UNITS)
    monkeypatch.setattr(backend, "_plans", {})
    monkeypatch.setattr(backend, "_facts", lambda tensors: object())  # nothing is remembered
    return made


def fitting(launch: Recorded, arch: int) -> Any:
    """Compiled, and it fits."""
    compiled = launch.compile(arch)
    assert_fits(compiled, config.SHARED_BYTES[arch])
    return compiled


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def pre_of(m: int, h: int, order: str, dtype: torch.dtype) -> Pre:
    if order == "apart":
        return meta(m, h, dtype=dtype), meta(m, h, dtype=dtype)
    return meta(m, 2 * h, dtype=dtype), None


def weights_of(k: int, h: int, n: int, order: str) -> Weights:
    if order == "apart":
        return Weights(meta(h, k), meta(h, k), meta(n, h))
    return Weights(meta(2 * h, k), None, meta(n, h))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", FLOATS, ids=FLOATS.values())
@pytest.mark.parametrize(("order", "h"), [("apart", 4096), ("interleaved", 4096), ("apart", 1365)])
def test_elementwise_passes(
    order: str, h: int, dtype: torch.dtype, arch: int, launches: list[Recorded]
) -> None:
    """Loads are wide, also of rows that begin anywhere."""
    m = 4095
    pre = pre_of(m, h, order, dtype)
    backend.gate_forward(pre, "gelu", order)
    needs = (True, order == "apart")
    backend.gate_backward(meta(m, h, dtype=dtype), pre, "gelu", order, needs, True)
    names = ["_gate_fwd_kernel", "_gate_bwd_kernel", "_sum_rows_kernel"]
    assert [r.name for r in launches] == names
    for launch in launches:
        compiled = fitting(launch, arch)
        wide = ".v4.b32" in compiled.asm["ptx"] or ".v4.f32" in compiled.asm["ptx"]
        assert wide or launch.name == "_sum_rows_kernel"


# M: the largest tile, and every smaller one
TOKENS = (4096, 512, 64, 16)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("m", TOKENS)
def test_products_with_the_gate(
    m: int,
    arch: int,
    launches: list[Recorded],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training, with biases: the forward keeps its pre-activations, the backward sums."""
    monkeypatch.setattr(backend, "_capability", lambda t: divmod(arch, 10))
    for order in ("apart", "interleaved") if m == 4096 else ("apart",):
        w = weights_of(1024, 4096, 1024, order)
        rows = w.gate.shape[0]
        b = Biases(meta(rows), meta(rows) if order == "apart" else None, meta(1024))
        x, dy, pre = meta(m, 1024), meta(m, 1024), pre_of(m, 4096, order, torch.bfloat16)
        backend.forward(x, w, b, "gelu_tanh", order, True)
        needs = (*[True] * 5, order == "apart", True)
        backend.backward(dy, pre, x, w, b, "gelu_tanh", order, needs)
    names = {"_dual_fwd_kernel", "_down_bwd_kernel", "_sum_rows_kernel"}
    assert {r.name for r in launches} == names
    for launch in launches:
        fitting(launch, arch)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_fits(
    activation: str, launches: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest tiles on Hopper."""
    monkeypatch.setattr(backend, "_capability", lambda t: (9, 0))
    w, b = weights_of(1024, 4096, 1024, "apart"), Biases(meta(4096), meta(4096), None)
    x, dy, pre = meta(4096, 1024), meta(4096, 1024), pre_of(4096, 4096, "apart", torch.bfloat16)
    backend.forward(x, w, b, activation, "apart", True)
    backend.backward(dy, pre, x, w, b, activation, "apart", (*[True] * 6, False))
    for launch in launches:
        fitting(launch, 90)


def test_configurations_fit_their_architecture() -> None:
    for arch, limit in config.SHARED_BYTES.items():
        for piece, operands in (("forward", 2), ("backward", 1)):
            for m in (1, 16, 100, 5000):
                c = config.product_config(piece, m, 4096, UNITS, divmod(arch, 10))
                assert c.shared_bytes(operands, 2) <= limit
                assert c.block_m < 2 * max(m, 16)


def test_orders_are_those_of_the_op() -> None:
    assert set(ORDERS) == {"apart", "gate_up", "up_gate", "interleaved"}
