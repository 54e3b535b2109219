"""The Triton kernels compile for each architecture, without spilling, on a machine without a GPU.

Launches are built from meta tensors, so what is compiled is what would be launched. Triton keeps
compiled kernels on disk, so a second run is quick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastlinear.families.linear.triton import (
    backend,
    backward_config,
    gemm_config,
    planes,
    product_config,
    single_config,
)
from fastlinear.families.linear.triton import backward as whole
from fastlinear.families.linear.triton import config as triton_config
from fastlinear.families.linear.triton import product as triton_product
from fastlinear.kernels.triton import sums
from tests.families import triton_offline
from tests.families.triton_offline import FLOATS, Recorded, recorder

ARCHS = {80: (8, 0), 90: (9, 0), 100: (10, 0)}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Launches made while the test runs; none is carried out."""
    made: list[Recorded] = []

    class Facts:
        units = 132

    for module in (backend, triton_product, whole, planes, sums):
        monkeypatch.setattr(module, "Launch", recorder(made))
    for module in (triton_product, planes):
        monkeypatch.setattr(module, "device_facts", lambda device: Facts)
    monkeypatch.setattr(backend, "units_of", lambda device: Facts.units)
    for module in (backend, whole, planes):
        module._plans.clear()
    return made


def assert_fits(compiled: Any, arch: int, frame: int = 0) -> None:
    """At most so large a stack frame, no local memory, and shared memory within the architecture's
    limit."""
    used = triton_offline.assert_fits(compiled, gemm_config._SHARED_BYTES[arch], frame)
    assert used.registers <= 255
    assert "local.u32" not in compiled.asm["ptx"]


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


FORWARDS: dict[str, tuple[torch.dtype, str, bool, tuple[int, int, int]]] = {
    "bfloat16": (torch.bfloat16, "gelu_tanh", True, (8192, 768, 3072)),
    "bfloat16 erf": (torch.bfloat16, "gelu", False, (8192, 768, 3072)),
    "bfloat16 few rows": (torch.bfloat16, "silu", True, (64, 1024, 4096)),
    "bfloat16 odd": (torch.bfloat16, "relu", False, (1000, 333, 777)),
    "float16": (torch.float16, "gelu", True, (8192, 768, 3072)),
    "float32": (torch.float32, "gelu", True, (8192, 768, 3072)),
    "float32 in slices": (torch.float32, "gelu_tanh", True, (512, 2048, 2048)),
    "float32 few rows": (torch.float32, "silu", False, (32, 4096, 4096)),
    "float32, 64 rows": (torch.float32, "relu", True, (64, 2048, 2048)),
    "float32, 16 rows": (torch.float32, "none", False, (16, 4096, 1024)),
    "float32 odd": (torch.float32, "relu", False, (1000, 333, 777)),
}


SLICED = {f"float32{what}" for what in (" in slices", " few rows", ", 64 rows", ", 16 rows")}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", FORWARDS)
def test_forward(
    case: str,
    arch: int,
    launches: list[Recorded],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dtype, activation, save_pre, (M, K, N) = FORWARDS[case]
    monkeypatch.setattr(triton_product, "capability_of", lambda device: ARCHS[arch])
    x, weight, bias = (meta(*s, dtype=dtype) for s in ((M, K), (N, K), (N,)))
    backend.forward(x, weight, bias, activation, save_pre)
    assert len(launches) == (2 if case in SLICED else 1)
    for launch in launches:
        compiled = launch.compile(arch)
        assert_fits(compiled, arch)
    if arch == 90 and dtype is not torch.float32 and M == 8192:
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert "cp.async.bulk.tensor" in compiled.asm["ptx"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("activation", "shape"), [("gelu", (8192, 768, 3072)), ("mish", (70, 333, 9))]
)
def test_planes(
    activation: str, shape: tuple[int, int, int], arch: int, launches: list[Recorded]
) -> None:
    M, K, N = shape
    x, weight, bias, dpre = (meta(*s, dtype=torch.float32) for s in ((M, K), (N, K), (N,), (M, N)))
    planes.forward(x, weight, bias, activation, True)
    planes.grad_input(dpre, weight)
    planes.grad_weight(dpre, x)
    for launch in launches:
        compiled = launch.compile(arch)
        assert_fits(compiled, arch, 8 if N % 16 else 0)  # two registers of odd rows on sm_80
        if launch.name == "_planes_kernel":  # sums are told apart by a factor that nobody knows
            assert "sitofp" in compiled.asm["ttgir"]
    assert {launch.name for launch in launches} >= {
        "_scales_kernel",
        "_split_kernel",
        "_planes_kernel",
    }


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("dtype", "K", "N"), [(torch.bfloat16, 1000, 2008), (torch.float32, 1004, 20)]
)
@pytest.mark.parametrize("piece", ["forward", "grad_input", "grad_weight"])
def test_rows_of_whole_loads_are_loaded_at_once(
    piece: str,
    dtype: torch.dtype,
    K: int,
    N: int,
    arch: int,
    launches: list[Recorded],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those of 8 numbers in 16 bits, and of 4 in float32: Triton knows 16 alone."""
    monkeypatch.setattr(triton_product, "capability_of", lambda device: ARCHS[arch])
    config = gemm_config.GemmConfig("pointer", 64, 32, 32, 4, 3)
    x, w, dpre = (meta(*s, dtype=dtype) for s in ((333, K), (N, K), (333, N)))
    if piece == "forward":
        backend.forward(x, w, None, "none", False, config=config)
    else:
        getattr(backend, piece)(dpre, w if piece == "grad_input" else x, config=config)
    ptx = launches[0].compile(arch).asm["ptx"]
    loads = [line for line in ptx.splitlines() if "cp.async.c" in line and "shared.global" in line]
    assert loads
    assert all("0x10" in line for line in loads)


@pytest.mark.parametrize("depth", [64, 96, 200])
def test_precision_follows_the_rows_but_in_batch_invariant_calls(
    depth: int, launches: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_product, "capability_of", lambda device: (9, 0))
    weight = meta(256, depth, dtype=torch.float32)
    for rows in (100, 1000):
        x = meta(rows, depth, dtype=torch.float32)
        invariant = triton_product.batch_invariant_config(x, weight.t())
        for config in (None, invariant):
            backend.forward(x, weight, None, "none", False, config=config)
    plain = ["ieee" in launch.rest for launch in launches if launch.name.startswith("_gemm")]
    assert plain[1] == plain[3]
    assert plain == {64: [True] * 4, 96: [True, True, False, True], 200: [False] * 4}[depth]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("M", [64, 512, 8192])
def test_forward_of_a_weight_stored_the_other_way(
    M: int,
    arch: int,
    launches: list[Recorded],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Conv1D's weight is (K, N): turned where that pays, else read as it lies."""
    monkeypatch.setattr(triton_product, "capability_of", lambda device: ARCHS[arch])
    x, weight, bias = (meta(*s, dtype=torch.float32) for s in ((M, 768), (768, 3072), (3072,)))
    backend.forward(x, weight.t(), bias, "gelu_tanh", False)
    names = [launch.name for launch in launches]
    assert names.count("_turn_kernel") == (arch >= 90 and M >= 512)
    for launch in launches:
        assert_fits(launch.compile(arch), arch)


def test_no_large_copies(launches: list[Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_product, "capability_of", lambda device: (9, 0))
    for rows, turned in ((1 << 16, 2), (1 << 17, 0)):
        launches.clear()
        backend.grad_weight(
            meta(rows, 2048, dtype=torch.float32), meta(rows, 1024, dtype=torch.float32)
        )
        names = [launch.name for launch in launches]
        assert names.count("_turn_kernel") == turned


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "none"])
def test_grad_pre(activation: str, dtype: torch.dtype, launches: list[Recorded]) -> None:
    dy, saved = (meta(8192, 3072, dtype=dtype) for _ in range(2))
    backend.grad_pre(dy, saved, activation, True)
    assert len(launches) == 2
    dy, saved = (meta(200, 1024, dtype=dtype) for _ in range(2))
    backend.grad_pre(dy, saved, activation, True)
    assert len(launches) == 3  # few rows: db comes from the same launch
    dy, saved = (meta(8191, 33, dtype=dtype) for _ in range(2))
    backend.grad_pre(dy, saved, activation, True)  # rows begin anywhere
    for launch in launches:
        for arch in (80, 90):
            compiled = launch.compile(arch)
            assert_fits(compiled, arch)
            if launch.name == "_grad_pre_kernel":
                ptx = compiled.asm["ptx"]
                assert ".v4.b32" in ptx or ".v4.f32" in ptx


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("product", ["grad_input", "grad_weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grad_products(
    product: str,
    dtype: torch.dtype,
    arch: int,
    launches: list[Recorded],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_product, "capability_of", lambda device: ARCHS[arch])
    other = (
        meta(3072, 768, dtype=dtype) if product == "grad_input" else meta(8192, 768, dtype=dtype)
    )
    run: Callable[..., Any] = getattr(backend, product)
    run(meta(8192, 3072, dtype=dtype), other)
    names = [launch.name for launch in launches]
    turned = 1 if product == "grad_input" else 2
    if dtype is torch.bfloat16 or arch < 90:
        turned = 0
    assert names.count("_turn_kernel") == turned
    run(meta(96, 3072, dtype=dtype), other[:96] if product == "grad_weight" else other)
    for launch in launches:
        assert_fits(launch.compile(arch), arch)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("M", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_of_few_rows(
    dtype: torch.dtype, M: int, arch: int, launches: list[Recorded]
) -> None:
    config = triton_config.FewRowsConfig(2, 64 * 16 // dtype.itemsize, 2)
    x, weight, bias = (meta(*s, dtype=dtype) for s in ((M, 4096), (4096, 4096), (4096,)))
    backend.forward(x, weight, bias, "gelu", True, config=config)
    (launch,) = launches
    compiled = launch.compile(arch)
    assert_fits(compiled, arch)
    assert ".v4.b32" in compiled.asm["ptx"]  # 16 bytes of W a thread


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("M", [1, 4, 32, 64, 128, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whole_backward(dtype: torch.dtype, M: int, arch: int, launches: list[Recorded]) -> None:
    dy, saved = meta(M, 1024, dtype=dtype), meta(M, 1024, dtype=dtype)
    x, weight = meta(M, 512, dtype=dtype), meta(1024, 512, dtype=dtype)
    if triton_config.max_backward_rows(ARCHS[arch]) < M:
        pytest.skip("more rows than this architecture serves")
    whole.backward(dy, saved, x, weight, "gelu", (True, True, True))
    for launch in launches:
        assert_fits(launch.compile(arch), arch)


@pytest.mark.parametrize(("arch", "M"), [(80, 32), (90, 16), (90, 128), (90, 520), (100, 520)])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whole_backward_in_every_configuration(
    dtype: torch.dtype, activation: str, M: int, arch: int, launches: list[Recorded]
) -> None:
    """Every one that may be chosen for so many rows, with dpre formed as it goes if it can."""
    for width in (512, 503):
        given = M, width, dtype, activation, (width == 512,) * 2
        for config in backward_config.BLOCKS[dtype.itemsize]:
            early = not backward_config.fits(config, *given)
            config = replace(config, dpre_first=early and activation != "none")
            if backward_config.fits(config, *given):
                dy, saved = meta(M, width, dtype=dtype), meta(M, width, dtype=dtype)
                x, weight = meta(M, width, dtype=dtype), meta(width, width, dtype=dtype)
                whole.backward(dy, saved, x, weight, activation, (True, True, True), config=config)
    made = [launch for launch in launches if "backward_kernel" in launch.name]
    assert len(made) >= 4
    for launch in made:
        assert_fits(launch.compile(arch), arch, frame=16)


def test_carried_sums_stay_in_registers(launches: list[Recorded]) -> None:
    for config in backward_config.BLOCKS[4]:
        if isinstance(config, triton_config.TilesConfig):
            dy, x, weight = (meta(8192, n, dtype=torch.float32) for n in (8192, 512, 512))
            whole.backward(dy, dy, x, weight, "relu", (True, True, True), config=config)
    assert len(launches) >= 3
    for launch in launches:
        assert_fits(launch.compile(90), 90)


@pytest.mark.parametrize("M", [4, 64, 512])
@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, True, True), (True, False, True)]
)
def test_part_of_the_backward(
    needs: tuple[bool, bool, bool], M: int, launches: list[Recorded]
) -> None:
    """What is not needed is None: a compiler sees that where an interpreter does not."""
    dy = meta(M, 512, dtype=torch.float16)
    x = meta(M, 256, dtype=torch.float16) if needs[1] else None
    weight = meta(512, 256, dtype=torch.float16) if needs[0] else None
    whole.backward(dy, None, x, weight, "none", needs)
    assert launches
    for launch in launches:
        assert_fits(launch.compile(90), 90)


def test_a_spill_is_seen(launches: list[Recorded]) -> None:
    """The check above fails on a configuration that needs more registers than there are."""
    config = gemm_config.GemmConfig("pointer", 256, 256, 32, 4, 2)
    assert config.problem(torch.bfloat16, (9, 0)) is not None
    x, weight = meta(4096, 512, dtype=torch.bfloat16), meta(4096, 512, dtype=torch.bfloat16)
    backend.forward(x, weight, None, "gelu", False, config=config)
    with pytest.raises(AssertionError, match="stack="):
        assert_fits(launches[0].compile(90), 90)


@pytest.mark.parametrize("product", ["forward", "grad_input"])
def test_each_operand_has_its_own_alignment(product: str, launches: list[Recorded]) -> None:
    """A kernel compiled for an aligned weight must not be handed one that is not."""
    run: Callable[..., Any] = {
        "forward": lambda a, b: backend.forward(a, b, None, "relu", False),
        "grad_input": backend.grad_input,
    }[product]
    even, odd = (torch.zeros(64 * 64 + 8, dtype=torch.float16) for _ in range(2))
    aligned, shifted = even[:4096].view(64, 64), odd[4:4100].view(64, 64)
    assert (aligned.data_ptr() % 16, shifted.data_ptr() % 16) == (0, 8)
    for pair in ((aligned, aligned), (aligned, shifted), (shifted, aligned), (shifted, shifted)):
        run(*pair)
    assert len(backend._plans) == 4


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (13, 0)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_chosen_configuration_is_valid(
    capability: tuple[int, int], dtype: torch.dtype
) -> None:
    for M in (1, 17, 64, 300, 1024, 8192, 100_000):
        for K, N in ((1, 1), (64, 64), (768, 3072), (1024, 4096), (4096, 4096), (12288, 49152)):
            for aligned in (True, False):
                if dtype is torch.float32:
                    single = single_config.config_for
                    chosen = [single(M, K, N, capability, aligned, yes) for yes in (True, False)]
                    chosen += [single(N, M, K, capability, aligned, yes) for yes in (True, False)]
                else:
                    sizes = ((M, K, N), (M, N, K), (N, M, K))
                    how = dtype, capability, aligned, (aligned, aligned)
                    chosen = [product_config.config_for(*size, *how) for size in sizes]
                for config in chosen:
                    assert config.problem(dtype, capability) is None, config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"capability": (7, 5)}, "compute capability 8.0"),
        ({"dtype": torch.float64}, "not float64"),
        ({"activation": "swish"}, "does not know"),
        ({"M": 2**30}, "below 2^30"),
        ({"x_strides": (2**31, 1)}, "strides"),
        ({}, None),
    ],
)
def test_reason_not(change: dict[str, Any], words: str | None) -> None:
    call: dict[str, Any] = {
        "M": 8,
        "K": 16,
        "N": 32,
        "dtype": torch.bfloat16,
        "activation": "gelu",
        "x_strides": (16, 1),
        "w_strides": (1, 32),
        "capability": (9, 0),
    }
    reason = backend.reason_not(**(call | change))
    assert (reason is None) if words is None else (reason is not None and words in reason)
