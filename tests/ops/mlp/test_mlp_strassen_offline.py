"""The Strassen chain's kernels compile for each architecture, on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastlinear.ops.mlp import strassen_triton as backend
from fastlinear.ops.mlp.strassen_scheme import Scheme

if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
NAMES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
}


@dataclass
class Recorded:
    """What a Launch was given, and the tensors it was called with."""

    kernel: Any
    rest: tuple[Any, ...]
    warps: int
    tensors: tuple[Any, ...] = ()

    def compile(self, arch: int) -> Any:
        """The kernel specialised as Triton's launcher would: ones and multiples of 16 are known."""
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int], list[Any]] = {}
        for i, value in enumerate((*self.tensors, *self.rest)):
            param = self.kernel.params[i]
            if isinstance(value, torch.Tensor):
                signature[param.name] = NAMES[value.dtype]
                attributes[(i,)] = [["tt.divisibility", 16]]
            elif param.is_constexpr or value is None or value == 1:
                signature[param.name] = "constexpr"
                constants[param.name] = value
            else:
                signature[param.name] = "i32"
                if value % 16 == 0:
                    attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        options = {"num_warps": self.warps}
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorded]]:
    """Launches made while the test runs; none is carried out."""
    made: list[Recorded] = []

    class Recorder:
        def __init__(self, kernel: Any, _: Any, rest: Any, device: Any, *, warps: int) -> None:
            self.record = Recorded(kernel, rest, warps)

        def __call__(self, *tensors: Any) -> None:
            self.record.tensors = tensors
            made.append(self.record)

    monkeypatch.setattr(backend, "Launch", Recorder)
    monkeypatch.setattr(torch, "bmm", lambda a, b, out: out)
    backend._launches.clear()
    yield made
    backend._launches.clear()
    backend.forget_weights()


def pose(m: int, width: int, dtype: torch.dtype, scheme: Scheme, act: str, save: bool) -> None:
    """A chain of two layers on meta tensors."""
    x = torch.empty(m, width, dtype=dtype, device="meta")
    weights = tuple(torch.empty(width, width, dtype=dtype, device="meta") for _ in range(2))
    biases = tuple(torch.empty(width, dtype=dtype, device="meta") for _ in range(2))
    backend.run(x, weights, biases, (act, act), save, scheme)


def stack_bytes(compiled: Any, tmp_path: Path) -> int:
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    match = re.search(r"STACK:(\d+)", usage)
    assert match, usage
    return int(match[1])


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("levels", [1, 2])
def test_no_spills_and_wide_accesses(
    levels: int, arch: int, launches: list[Recorded], tmp_path: Path
) -> None:
    pose(4096, 2048, torch.float32, Scheme("strassen", levels), "relu", False)
    # prefix, weight, chain, weight, suffix
    assert len(launches) == 5
    planes = 7**levels
    for launch, stores in zip(launches[:3], (planes, planes, planes), strict=True):
        compiled = launch.compile(arch)
        assert stack_bytes(compiled, tmp_path) == 0
        wide = re.findall(r"st\.global\.v[24]\.b32", compiled.asm["ptx"])
        assert len(wide) == stores, launch.kernel
    assert stack_bytes(launches[4].compile(arch), tmp_path) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["strassen", "classical"])
def test_training_and_odd_sizes(
    name: str, dtype: torch.dtype, launches: list[Recorded], tmp_path: Path
) -> None:
    pose(1001, 777, dtype, Scheme(name, 1), "gelu", True)
    for launch in (launches[0], launches[1], launches[2], launches[4]):
        assert stack_bytes(launch.compile(90), tmp_path) == 0


def test_launches_are_remembered(launches: list[Recorded]) -> None:
    for _ in range(2):
        pose(64, 64, torch.float32, Scheme("strassen", 1), "relu", False)
    assert len(launches) == 10
    assert len(backend._launches) == 4  # prefix, weight, chain, suffix
