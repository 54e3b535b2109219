"""Compile Triton kernels without a GPU, and read what the compiler used from the cubin.

A file that imports this one is skipped where Triton is missing or interprets.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastlinear.kernels.triton.launch import OPTIONS

if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
FLOATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NAMES = FLOATS | {torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8"}


class Usage(NamedTuple):
    """What one kernel takes: registers a thread, bytes of stack (spills live there)."""

    registers: int
    stack: int


def dumped(compiled: Any, *options: str) -> str:
    """What ``cuobjdump`` says of a compiled kernel."""
    with TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        command = [CUOBJDUMP, *options, cubin]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def usage(compiled: Any) -> Usage:
    """What a compiled kernel takes."""
    told = dumped(compiled, "--dump-resource-usage")
    match = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert match, told
    return Usage(int(match[1]), int(match[2]))


def assert_fits(compiled: Any, shared_bytes: int, frame: int = 0) -> Usage:
    """At most so large a stack frame, and shared memory within the architecture's limit; what it
    takes."""
    used, metadata = usage(compiled), compiled.metadata
    assert used.stack <= frame, f"{metadata.name} for {metadata.target}: {used}"
    assert metadata.shared <= shared_bytes, f"{metadata.name} for {metadata.target}"
    return used


def compile_for(
    arch: int,
    warps: int,
    stages: int,
    kernel: Any,
    signature: Mapping[str, Any],
    constants: Mapping[Any, Any],
    attributes: Mapping[Any, Any],
) -> Any:
    """A kernel specialised so, for compute capability ``arch``."""
    source = ASTSource(kernel, signature, constants, attributes)
    options = OPTIONS | {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@dataclass
class Recorded:
    """What a launch was given, and the tensors it was called with."""

    kernel: Any
    rest: tuple[Any, ...]
    options: dict[str, Any]
    tensors: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def compile(self, arch: int) -> Any:
        """The kernel specialised as Triton's launcher would: ones and multiples of 16 are known."""
        blocks = self.options.get("block_shapes") or {}
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int], list[Any]] = {}
        for i, value in enumerate((*self.tensors, *self.rest)):
            param = self.kernel.params[i]
            if isinstance(value, Tensor):
                name, shape = _NAMES[value.dtype], ",".join(str(b) for b in blocks.get(i, ()))
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
        how = arch, self.options["warps"], self.options.get("stages", 3)
        return compile_for(*how, self.kernel, signature, constants, attributes)


def recorder(made: list[Recorded]) -> type:
    """Stands for ``triton_launch.Launch``: a call adds to ``made``, and nothing is launched."""

    class Recorder:
        def __init__(self, kernel: Any, grid: Any, rest: Any, device: Any, **options: Any) -> None:
            assert all(0 < size < 2**31 for size in grid)
            assert all(size < 2**16 for size in grid[1:])
            self.described = bool(options.get("block_shapes"))
            self.record = Recorded(kernel, rest, options)

        def __call__(self, *tensors: Any) -> None:
            self.record.tensors = tensors
            made.append(self.record)

    return Recorder
