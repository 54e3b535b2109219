"""Kernels for Hopper compiled for the CPU and launched there, by ``emulated_hopper.h``."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import CUDA_HEADER
from fastlinear.kernels.cuda import compiled
from fastlinear.kernels.cuda.hopper import ASYNC, WORDS
from fastlinear.native import cuda_driver as driver

if not shutil.which("g++"):
    pytest.skip("needs a C++ compiler", allow_module_level=True)

_EMULATED = Path(__file__).with_name("emulated_hopper.h")
_FOLDER = tempfile.TemporaryDirectory(prefix="emulated")
_BUILT: dict[str, ctypes.CDLL] = {}
_INSTRUCTIONS = {
    'asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));': "y = exp2f(x);",
    'asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));': "y = 1.0f / x;",
}
_MAIN = """
{params} given_{name};
void body_{name}() {{
  {name}(given_{name});
  fibers[current].done = true;
}}
extern "C" void launch_{name}(const void* params, int size, int blocks, int layers, int threads) {{
  if (size != sizeof({params})) {{
    fprintf(stderr, "%d bytes of %d\\n", size, static_cast<int>(sizeof({params})));
    abort();
  }}
  memcpy(&given_{name}, params, sizeof(given_{name}));
  run_grid(blocks, layers, threads, body_{name});
}}
"""
_KERNEL = re.compile(r"__launch_bounds__\([^)]*\)\s+(\w+)\(const __grid_constant__ (\w+) p\)")


def emulated_source(text: str) -> str:
    """A source for a CPU: in place of PTX, what emulates it; a function launch_NAME a kernel."""
    macros = "".join(line for line in text.splitlines(True) if line.startswith("#define"))
    activations = ""
    before = WORDS.read_text()
    if CUDA_HEADER.read_text() in text:
        activations = CUDA_HEADER.read_text()
        before = ASYNC.read_text()
    for ptx, meant in _INSTRUCTIONS.items():
        activations = activations.replace(ptx, meant)
    assert before in text
    kernel = text[text.index(before) + len(before) :]
    kernel = re.sub(r"(?<!extern )__shared__", "static", kernel)  # of a block, which runs alone
    named = set(re.findall(r"void (\w+)\(float \(&d\)", text)) - {"wgmma", "wgmma_first"}
    products = "".join(map(_product, sorted(named)))
    launches = "".join(_MAIN.format(name=n, params=p) for n, p in _KERNEL.findall(kernel))
    return macros + _EMULATED.read_text() + activations + products + kernel + launches


def _product(name: str) -> str:
    """wgmma by another name."""
    like = "wgmma_first" if name.endswith("_first") else "wgmma"
    given = "(float (&acc)[kCount], u64 a, u64 b)"
    return f"template <int kCount>\ninline void {name}{given} {{ {like}(acc, a, b); }}\n"


class Map(driver.TensorMap):
    """A TMA descriptor of rows of 128 bytes, as ``emulated_hopper.h`` reads it."""

    def __init__(
        self,
        dtype: str,
        n: int,
        k: int,
        stride: int,
        box_rows: int,
        box_columns: int,
        address: int,
        _device: int,
        planes: int = 0,
    ) -> None:
        size = {"float16": 2, "bfloat16": 2, "float32": 4}[dtype]
        assert box_columns * size == 128
        assert stride * size % 16 == 0
        assert address % 16 == 0
        self._facts = stride, stride * n, n, k, max(1, planes), box_rows, size
        self._own = ctypes.create_string_buffer(128)
        self.pointer = ctypes.addressof(self._own)
        self.point_at(address)

    def point_at(self, address: int) -> None:
        assert address % 16 == 0
        ctypes.memmove(self.pointer, struct.pack("<Qqqiiiii", address, *self._facts), 44)


class Launch:
    """``cuda_driver.Launch`` of a kernel compiled for the CPU."""

    def __init__(self, kernel: Any, threads: int, _cluster: int, arguments: Any) -> None:
        self._text, self._name, self._threads = kernel.text, kernel.name, threads
        self._arguments = arguments
        self._config = driver._LaunchConfig()
        self._config.grid[:] = [1, 1, 1]

    def max_clusters(self) -> int:
        return 2

    def set_grid(self, blocks: int) -> None:
        self._config.grid[0] = blocks

    def begin_early(self) -> None:
        pass

    def run(self, _stream: int) -> None:
        if self._text not in _BUILT:
            path = Path(_FOLDER.name) / f"{len(_BUILT)}.cpp"
            path.write_text(emulated_source(self._text))
            built = path.with_suffix(".so")
            flags = ["-O1", "-std=c++17", "-w", "-Wno-psabi", "-shared", "-fPIC", "-fno-gnu-unique"]
            flags += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
            subprocess.run(["g++", *flags, "-o", built, path], check=True)
            _BUILT[self._text] = ctypes.CDLL(str(built))
        (memory,) = self._arguments
        grid = self._config.grid
        launch = getattr(_BUILT[self._text], f"launch_{self._name}")
        launch(memory, ctypes.sizeof(memory), grid[0], grid[1], self._threads)


class Kernel:
    """``cuda_driver.Kernel``, not compiled yet."""

    device = None

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name


def emulate(monkeypatch: pytest.MonkeyPatch, backend: ModuleType, units: int = 4) -> None:
    """Launches of a backend run on the CPU, of a device with so many multiprocessors. New memory is
    NaN, or large."""
    new_empty = Tensor.new_empty

    def unknown(t: Tensor, *shape: int, **kind: Any) -> Tensor:
        made = new_empty(t, *shape, **kind)
        return made.fill_(float("nan") if made.is_floating_point() else 0x7FFE)

    facts = SimpleNamespace(units=units)
    for where, name, value in (
        (driver, "TensorMap", Map),
        (driver, "Launch", Launch),
        (compiled, "kernel", lambda text, name, *_: Kernel(text, name)),
        (backend, "device_facts", lambda _: facts),
        (Tensor, "new_empty", unknown),
    ):
        monkeypatch.setattr(where, name, value)
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *_: None, raising=False)
