"""The Triton kernels compile for each architecture, without spilling, on a machine without a GPU.

Launches are built from meta tensors, so what is compiled is what would be launched.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import sign_mask
from fastlinear.families.grouped.triton import backward as whole
from fastlinear.families.grouped.triton import config as triton_config
from fastlinear.families.grouped.triton import copies, tensors
from fastlinear.families.grouped.triton import forward as products
from tests.families.triton_offline import FLOATS, Recorded, assert_fits, dumped, recorder

DTYPES = {name: dtype for dtype, name in FLOATS.items()}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Launches made while the test runs; none is carried out."""
    made: list[Recorded] = []
    for name in ("Launch", "EarlyLaunch"):
        monkeypatch.setattr(products, name, recorder(made))
    for module in (whole, copies):
        monkeypatch.setattr(module, "Launch", recorder(made))
    monkeypatch.setattr(tensors, "units_of", lambda device: 132)
    products._plans.clear()
    whole._plans.clear()
    copies._plans.clear()
    return made


def on(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "capability_of", lambda device: divmod(arch, 10))
    monkeypatch.setattr(products, "begins_early", lambda device: arch >= 90)


def fitting(launch: Recorded, arch: int) -> Any:
    """Compiled, and it fits."""
    compiled = launch.compile(arch)
    assert_fits(compiled, triton_config.SHARED_BYTES[arch])
    return compiled


def tokens(m: int, groups: int, features: int, dtype: torch.dtype, order: str) -> Tensor:
    like = torch.empty(0, device="meta")
    batch = 4 if order == "channels" else 1
    return layouts.empty((batch, m // batch, groups, features), order, like, dtype)


# G, K, N, M
FORWARDS = {
    "100": (100, 100, 100, 4096),
    "64": (64, 64, 64, 16384),
    "32": (256, 32, 32, 16384),
    "256": (16, 256, 256, 16384),
    "few": (8, 100, 100, 64),
    "streaming": (4, 1000, 600, 4096),
    "one output": (14, 256, 1, 28205),
    "one, streaming": (24, 1000, 1, 4096),
}


@pytest.mark.parametrize("arch", [80, 86, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("case", FORWARDS)
def test_forward(
    case: str,
    dtype: str,
    arch: int,
    launches: list[Recorded],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(arch, monkeypatch)
    groups, k, n, m = FORWARDS[case]
    x = tokens(m, groups, k, DTYPES[dtype], "tokens")
    weight = torch.empty(groups, n, k, dtype=DTYPES[dtype], device="meta")
    bias = torch.empty(groups, n, dtype=DTYPES[dtype], device="meta")
    products.forward(x, weight, bias, "gelu", True, "tokens")
    (launch,) = launches
    compiled = fitting(launch, arch)
    assert ("griddepcontrol.wait" in compiled.asm["ptx"]) == (
        arch >= 90 and launch.name == "_resident_kernel"
    )
    if n == 1:  # a sum
        assert "mma." not in compiled.asm["ptx"]
    elif arch == 90 and dtype == "bf16":
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        # 8 bytes at once where rows are aligned to no more, else 16
        width = 8 if k % 8 else 16
        assert re.search(
            rf"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x{width:x}",
            compiled.asm["ptx"],
        )


@pytest.mark.parametrize("order", ["groups", "channels"])
def test_forward_in_other_orders(
    order: str, launches: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(90, monkeypatch)
    x = tokens(4096, 100, 100, torch.bfloat16, order)
    weight = torch.empty(100, 100, 100, dtype=torch.bfloat16, device="meta")
    products.forward(x, weight, None, "relu", False, order)
    fitting(launches[0], 90)


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("order", layouts.ORDERS)
def test_derivative_of_its_own(
    order: str, arch: int, launches: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever order, 16 bytes at once, or 8 where a row of features is aligned to no more."""
    on(arch, monkeypatch)
    dy = tokens(4096, 100, 100, torch.bfloat16, order)
    whole._grad_pre(dy, torch.empty_like(dy), "gelu", True)
    compiled = fitting(launches[0], arch)
    words = 4 if order == "channels" else 2
    assert f"ld.global.v{words}.b32" in compiled.asm["ptx"]
    assert f"st.global.v{words}.b32" in compiled.asm["ptx"]


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
@pytest.mark.parametrize(
    ("dtype", "size"), [("bf16", 100), ("bf16", 50), ("bf16", 32), ("fp32", 64), ("fp32", 32)]
)
def test_backward(
    dtype: str,
    size: int,
    activation: str,
    arch: int,
    launches: list[Recorded],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(arch, monkeypatch)
    x = tokens(4096, 100, size, DTYPES[dtype], "tokens")
    weight = torch.empty(100, size, size, dtype=DTYPES[dtype], device="meta")
    saved = None if activation == "none" else x
    whole.backward(x, saved, x, weight, activation, (True, True, True), "tokens")
    assert launches
    for launch in launches:
        fitting(launch, arch)


@pytest.mark.parametrize(
    ("size", "arch"), [(100, 90), (64, 90), (32, 90), (32, 80), (32, 100), (17, 90)]
)
def test_signs(
    size: int, arch: int, launches: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read without spilling, and on Hopper written without asking another lane."""
    on(arch, monkeypatch)
    x = tokens(4096, 100, size, torch.bfloat16, "channels")
    weight = torch.empty(100, size, size, dtype=torch.bfloat16, device="meta")
    place = sign_mask.place_for(x, weight, "relu", "channels", "triton", "triton")
    assert place is not None
    _, kept = products.forward(x, weight, None, "relu", False, "channels", sign_mask=place)
    compiled = fitting(launches[0], arch)
    assert arch != 90 or "SHFL" not in dumped(compiled, "--dump-sass")
    assert kept is not None
    whole.backward(x, kept, x, weight, "relu", (True, True, True), "channels")
    assert [launch.name for launch in launches[1:]] == ["_backward_kernel", "_sum_chunks_kernel"]
    for launch in launches[1:]:
        fitting(launch, arch)


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_backward_of_large_groups(
    dtype: str,
    arch: int,
    launches: list[Recorded],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(arch, monkeypatch)
    x, dy = (tokens(4096, 16, size, DTYPES[dtype], "tokens") for size in (256, 300))
    weight = torch.empty(16, 300, 256, dtype=DTYPES[dtype], device="meta")
    whole.backward(dy, dy, x, weight, "gelu", (True, True, True), "tokens")
    names = [launch.name for launch in launches]
    assert names.count("_grad_weight_kernel") == 1
    for launch in launches:
        fitting(launch, arch)


@pytest.mark.parametrize("k", [100, 256])
def test_backward_of_up_to_256_features(
    k: int, launches: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(90, monkeypatch)
    x, dy = (tokens(4096, 16, size, torch.bfloat16, "channels") for size in (k, 256))
    weight = torch.empty(16, 256, k, dtype=torch.bfloat16, device="meta")
    whole.backward(dy, dy, x, weight, "gelu", (True, True, True), "channels")
    names = [launch.name for launch in launches]
    assert names.count("_grad_pre_kernel") == names.count("_backward_kernel") == 1
    assert "_grad_weight_kernel" not in names
    for launch in launches:
        fitting(launch, 90)


def test_too_many_accumulators_are_told(launches: list[Recorded]) -> None:
    """The check above does see a spill."""
    x = tokens(4096, 8, 256, torch.bfloat16, "tokens")
    weight = torch.empty(8, 256, 256, dtype=torch.bfloat16, device="meta")
    config = triton_config.ProductConfig(128, 256, 64, 4, 2)
    products.forward(x, weight, None, "gelu", False, "tokens", config=config)
    with pytest.raises(AssertionError, match="stack="):
        fitting(launches[0], 90)


def test_strides_beyond_32_bits_are_left_to_pytorch() -> None:
    wide = torch.empty(1, device="meta").as_strided((1, 4, 2, 3), (1, 2**30, 3, 1))
    assert tensors.far_apart(wide)
    assert not tensors.far_apart(tokens(2**16, 64, 128, torch.bfloat16, "tokens"))
    weight = torch.empty(1, device="meta").as_strided((2, 2**16, 2), (4, 2**16, 1))
    assert tensors.far_apart(weight)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, (16, 0, 0)), (64, (64, 0, 0)), (100, (64, 32, 16)), (250, (256, 0, 0)), (72, (64, 16, 0))],
)
def test_parts(size: int, expected: tuple[int, int, int]) -> None:
    assert triton_config.parts(size) == expected


@pytest.mark.parametrize("size", range(1, 257))
def test_parts_cover(size: int) -> None:
    found = [p for p in triton_config.parts(size) if p]
    assert size <= sum(found) < size + max(16, size)
    assert all(p >= 16 and p & (p - 1) == 0 for p in found)
    assert sum(found[:-1]) < size  # only the last needs a mask


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"capability": (7, 5)}, "compute capability 8.0"),
        ({"dtype": torch.float64}, "not float64"),
        ({"tokens": 2**24}, "below 2^23"),
        ({"groups": 70_000, "k": 1, "n": 1}, "65535 groups"),
        ({}, None),
    ],
)
def test_reason_not(change: dict[str, Any], words: str | None) -> None:
    call: dict[str, Any] = {
        "tokens": 8,
        "groups": 4,
        "k": 16,
        "n": 32,
        "dtype": torch.bfloat16,
        "capability": (9, 0),
    }
    reason = triton_config.reason_not(**(call | change))
    assert (reason is None) if words is None else (reason is not None and words in reason)


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("order", layouts.ORDERS)
def test_copies(order: str, dtype: str, arch: int, launches: list[Recorded]) -> None:
    like = torch.empty(0, dtype=DTYPES[dtype], device="meta")
    t = layouts.empty((64, 12, 8, 333), order, like, like.dtype)
    out = layouts.empty((64, 12, 8, 336), "groups", like, like.dtype)
    copies.copy_tokens(t, out)
    for launch in launches:
        fitting(launch, arch)
    assert [launch.name for launch in launches] == ["_copy_tokens_kernel"]
