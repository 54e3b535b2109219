"""Compile CUDA C++ sources without a GPU, and read what the compiler used from the cubin.

What was read is kept on disk under a name made of all that was compiled and of the compiler, as
Triton keeps its kernels: a second run compiles what has changed.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import struct
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from fastlinear.native import cuda_driver as driver

_NV_INFO = b".nv.info"
_WORDS = 4  # this attribute carries `size` bytes
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F
_SYMBOL_TABLE = 2
_KEPT = Path(__file__).parents[2] / ".pytest_cache" / "nvrtc"


class Usage(NamedTuple):
    """What one kernel takes: registers a thread, bytes of local memory (spills and arrays)."""

    registers: int
    frame: int


@cache
def missing() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        driver.compile_cubin('extern "C" __global__ void probe() {}', "probe.cu", "sm_90a")
    except driver.DriverError as error:
        return f"no working NVRTC: {error}"
    return None


def usage(source: str, name: str, arch: str = "sm_90a") -> dict[str, Usage]:
    """Compile a source and say what each of its kernels takes; skips where NVRTC is missing."""
    reason = missing()
    if reason is not None:
        pytest.skip(f"{reason} (pip install nvidia-cuda-nvrtc)")
    told = "\0".join((source, name, arch, _compiler(), Path(__file__).read_text()))
    kept = _KEPT / f"{hashlib.sha256(told.encode()).hexdigest()}.json"
    if kept.exists():
        return {kernel: Usage(*numbers) for kernel, numbers in json.loads(kept.read_text()).items()}
    found = parse(driver.compile_cubin(source, name, arch))
    _KEPT.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(found))
    part.replace(kept)
    return found


@cache
def _compiler() -> str:
    """NVRTC's version, and which options it is called with."""
    numbers = ctypes.c_int(), ctypes.c_int()
    assert driver._nvrtc().nvrtcVersion(*map(ctypes.byref, numbers)) == 0
    library = Path(driver._nvrtc()._name)
    size = library.stat().st_size if library.exists() else 0
    caller = Path(driver.__file__).read_text()
    return f"{numbers[0].value}.{numbers[1].value} {library} {size} {caller}"


def parse(cubin: bytes) -> dict[str, Usage]:
    """Usage by kernel name, from the cubin's ELF attributes."""
    sections = _sections(cubin)
    (symbols, strings_index), *_ = [
        (body, link) for _, kind, link, body in sections if kind == _SYMBOL_TABLE
    ]
    strings = sections[strings_index][3]
    found: dict[tuple[str, int], int] = {}
    for section, _, _, body in sections:
        if section != _NV_INFO:
            continue
        at = 0
        while at < len(body):
            form, attribute, size = struct.unpack_from("<BBH", body, at)
            at += 4
            if form != _WORDS:
                continue
            if attribute in (_FRAME_SIZE, _REGISTERS):
                symbol, value = struct.unpack_from("<II", body, at)
                start = struct.unpack_from("<I", symbols, symbol * 24)[0]
                name = strings[start : strings.index(b"\0", start)].decode()
                found[name, attribute] = value
            at += size
    return {
        name: Usage(registers, found[name, _FRAME_SIZE])
        for (name, attribute), registers in found.items()
        if attribute == _REGISTERS
    }


def _sections(elf: bytes) -> list[tuple[bytes, int, int, bytes]]:
    """(name, type, link, body) of every section of a 64-bit little-endian ELF file."""
    table = struct.unpack_from("<Q", elf, 0x28)[0]
    entry, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    rows = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * entry) for i in range(count)]
    base = rows[names][4]
    return [
        (
            elf[base + row[0] : elf.index(b"\0", base + row[0])],
            row[1],
            row[6],
            elf[row[4] : row[4] + row[5]],
        )
        for row in rows
    ]
