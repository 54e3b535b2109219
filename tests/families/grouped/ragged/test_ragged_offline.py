"""The kernels of ragged_linear compile for each architecture, without spilling, anywhere.

Launches are built from meta tensors, so what is compiled is what would be launched.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastlinear.families.grouped.ragged.triton import backend
from fastlinear.families.grouped.ragged.triton.backend import Config
from fastlinear.families.grouped.triton import config as triton_config
from fastlinear.kernels.triton.launch import OPTIONS

if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
}
Call = tuple[Any, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Kernel, tensors, rest and options of launches made while the test runs."""
    made: list[Call] = []

    class Recorder:
        def __init__(self, kernel: Any, grid: Any, rest: Any, device: Any, **options: Any) -> None:
            assert all(0 < size < 2**31 for size in grid)
            self.described = bool(options["block_shapes"])
            self.given = kernel, rest, options

        def __call__(self, *tensors: Any) -> None:
            kernel, rest, options = self.given
            made.append((kernel, tensors, rest, options))

    monkeypatch.setattr(backend, "Launch", Recorder)
    backend._plans.clear()
    return made


def compiled(call: Call, arch: int) -> Any:
    """The kernel specialised as Triton's launcher would: ones and multiples of 16 are known."""
    kernel, tensors, rest, options = call
    blocks = options["block_shapes"] or {}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[Any]] = {}
    for i, value in enumerate((*tensors, *rest)):
        param = kernel.params[i]
        if isinstance(value, Tensor):
            shape = ",".join(str(b) for b in blocks.get(i, ()))
            name = NAMES[value.dtype]
            signature[param.name] = f"tensordesc<{name}[{shape}]>" if shape else f"*{name}"
            if not shape:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif param.is_constexpr or value is None or value == 1:
            signature[param.name] = "constexpr"
            constants[param.name] = value
        else:
            signature[param.name] = "i32"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    given = OPTIONS | {"num_warps": options["warps"], "num_stages": options["stages"]}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=given)


def assert_fits(call: Call, arch: int, tmp_path: Path) -> Any:
    """No stack frame (spills live there), and shared memory within the architecture's limit."""
    found = compiled(call, arch)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(found.asm["cubin"])
    told = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"STACK:0 ", told), (call[0].__name__, arch, call[3], told)
    assert found.metadata.shared <= triton_config.SHARED_BYTES[arch]
    return found


def launch_all(
    rows: int,
    groups: int,
    k: int,
    n: int,
    dtype: torch.dtype,
    activation: str,
    product: Config | None = None,
    weights: Config | None = None,
) -> None:
    def like(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, w, b, dy = like(rows, k), like(groups, n, k), like(groups, n), like(rows, n)
    sizes = torch.empty(groups, dtype=torch.int64, device="meta")
    pre = activation not in ("none", "relu")
    saved = None if activation == "none" else dy
    backend.product(x, w, b, None, sizes, activation, pre, config=product)
    backend.grad_input(dy, saved, w, sizes, activation, config=product)
    backend.grad_weight(dy, saved, x, sizes, activation, True, True, config=weights)


# T, G, K, N
SIZES = {
    "experts": (8192, 8, 512, 512),
    "many": (4096, 64, 1024, 512),
    "few rows": (64, 8, 4096, 14336),
    "odd": (300, 5, 100, 36),
    "thousands": (8192, 5000, 64, 64),
}


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("case", SIZES)
def test_default_configurations(
    case: str, activation: str, dtype: torch.dtype, arch: int, calls: list[Call], tmp_path: Path
) -> None:
    launch_all(*SIZES[case], dtype, activation)
    assert len(calls) == 3
    for call in calls:
        found = assert_fits(call, arch, tmp_path)
        wide_rows = call[2][-8] >= 64  # what wgmma takes
        if arch == 90 and dtype is torch.bfloat16 and case == "experts" and wide_rows:
            assert "wgmma.mma_async" in found.asm["ptx"]


@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["dW", "db"])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_one_gradient_alone(
    activation: str, wanted: tuple[bool, bool], calls: list[Call], tmp_path: Path
) -> None:
    """Of a frozen weight, or of none: the kernel compiles without what is not there."""
    dy, x = (torch.empty(300, size, dtype=torch.bfloat16, device="meta") for size in (36, 100))
    sizes = torch.empty(5, dtype=torch.int64, device="meta")
    saved = None if activation == "none" else dy
    backend.grad_weight(dy, saved, x, sizes, activation, *wanted)
    assert_fits(calls[-1], 90, tmp_path)


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_descriptors(activation: str, calls: list[Call], tmp_path: Path) -> None:
    product = Config(128, 128, 64, 8, 4, tma=True)
    weights = Config(64, 128, 128, 8, 4, tma=True)
    launch_all(8192, 8, 512, 512, torch.bfloat16, activation, product, weights)
    assert len(calls) == 3
    for call in calls:
        found = assert_fits(call, 90, tmp_path)
        assert "cp.async.bulk.tensor" in found.asm["ptx"]
        assert "wgmma.mma_async" in found.asm["ptx"]


def test_descriptors_are_not_for_all(calls: list[Call]) -> None:
    """Odd rows and depths that are no whole tiles take plain loads."""
    product = Config(64, 64, 64, 4, 3, tma=True)
    launch_all(300, 5, 100, 36, torch.bfloat16, "none", product, product)
    assert all(call[3]["block_shapes"] is None for call in calls)
    launch_all(300, 5, 96, 40, torch.bfloat16, "none", product, product)
    assert [bool(call[3]["block_shapes"]) for call in calls[3:]] == [False, False, True]
