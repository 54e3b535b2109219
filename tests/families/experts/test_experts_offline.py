"""The Triton passes compile for each architecture, without spilling, on a machine without a GPU.

Launches are built from meta tensors, so what is compiled is what would be launched.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.families.experts.gate import Gate
from fastlinear.families.experts.triton import passes
from fastlinear.families.gated.stacking import STACKED
from fastlinear.families.gated.triton.config import SHARED_BYTES
from tests.families.triton_offline import FLOATS, Recorded, assert_fits, recorder

ARCHS = (80, 90, 100)
INF = float("inf")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Launches made while the test runs; none is carried out."""
    made: list[Recorded] = []
    monkeypatch.setattr(passes, "Launch", recorder(made))
    monkeypatch.setattr(passes.tensors, "facts_of", lambda *_: (object(),))  # nothing is kept
    return made


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call(
    tokens: int, top: int, experts: int, h: int, i: int, dtype: torch.dtype, gate: Gate
) -> None:
    """All passes of a training step, with a bias and every gradient."""
    index = meta(tokens, top, dtype=torch.int64)
    weight = meta(tokens, top, dtype=torch.float32)
    order, place, _ = passes.sort(index, 0, experts)
    passes.gather(meta(tokens, h, dtype=dtype), order, top)
    pre = meta(tokens * top, 2 * i, dtype=dtype)
    passes.gate_forward(pre, gate)
    dys = passes.gather(meta(tokens, h, dtype=dtype), order, top, weight)
    passes.combine(meta(tokens * top, h, dtype=dtype), place, top, weight)
    dh, bias = meta(tokens * top, i, dtype=dtype), meta(experts, h, dtype=dtype)
    facts = order, index, weight, 0, experts, dys, bias
    passes.gate_backward(dh, pre, gate, *facts, (True, True, True))


def fitting(launches: list[Recorded], arch: int) -> list[Any]:
    """Compiled, and they fit."""
    found = [launch.compile(arch) for launch in launches]
    for compiled in found:
        assert_fits(compiled, SHARED_BYTES[arch])
    return found


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", FLOATS, ids=FLOATS.values())
@pytest.mark.parametrize("order", [STACKED[0], STACKED[2]])
def test_passes(order: str, dtype: torch.dtype, arch: int, launches: list[Recorded]) -> None:
    call(4096, 4, 64, 2048, 1408, dtype, Gate("silu", order, 7.0, 1.702, 1.0))
    assert [launch.name for launch in launches] == [
        *("_sort_kernel", "_gather_kernel", "_expert_gate_fwd_kernel", "_gather_kernel"),
        *("_combine_kernel", "_expert_gate_bwd_kernel"),
    ]
    wide = [c for c in fitting(launches, arch) if "sort" not in c.metadata.name]
    for compiled in wide:
        assert ".v4.b32" in compiled.asm["ptx"] or ".v4.f32" in compiled.asm["ptx"]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (7, 3, 5, 33, 17), (32768, 8, 128, 2048, 768)])
def test_sizes(sizes: tuple[int, ...], launches: list[Recorded]) -> None:
    tokens, top, experts, h, i = sizes
    call(tokens, top, experts, h, i, torch.bfloat16, Gate("silu", "gate_up", INF, 1.0, 0.0))
    fitting(launches, 90)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_fits(activation: str, launches: list[Recorded]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        call(512, 2, 8, 1024, 512, dtype, Gate(activation, "gate_up", 7.0, 1.702, 1.0))
    fitting(launches, 90)
