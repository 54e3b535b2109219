"""Facts about a device that dispatch and reports rely on. Nothing here initialises CUDA
unless a CUDA device is asked about."""

from __future__ import annotations

import platform
import re
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class DeviceFacts:
    """What one device is.

    Attributes:
        kind: ``"cpu"`` or ``"cuda"``.
        name: the vendor's name for it.
        slug: lower-case name fit for file names, for example ``"nvidia-h200"``.
        capability: CUDA compute capability, ``(0, 0)`` on a CPU.
        units: multiprocessors on a GPU, torch's intra-op threads on a CPU.
        isa: instruction set torch uses on a CPU, ``"sm_90"`` and the like on a GPU.
        memory_bytes: device memory (0 on a CPU).
        l2_bytes: size of the last cache level shared by all units (0 when unknown).
    """

    kind: str
    name: str
    slug: str
    capability: tuple[int, int]
    units: int
    isa: str
    memory_bytes: int
    l2_bytes: int

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return asdict(self)


def device_facts(device: torch.device | str = "cpu") -> DeviceFacts:
    """Facts about ``device``. Asking about a CUDA device initialises CUDA; a CPU never does."""
    device = torch.device(device)
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return _cuda_facts(index)
    return _cpu_facts(torch.get_num_threads())


def memory_rate(device: torch.device) -> float:
    """Bytes a second that a GPU's memory is rated at, by its clock and width; 0.0 where torch does
    not tell."""
    p = torch.cuda.get_device_properties(device)
    clock, width = getattr(p, "memory_clock_rate", 0), getattr(p, "memory_bus_width", 0)
    return 2e3 * clock * width / 8  # kHz, bits; two a cycle


@lru_cache(maxsize=16)
def _cuda_facts(index: int) -> DeviceFacts:
    p = torch.cuda.get_device_properties(index)
    return DeviceFacts(
        kind="cuda",
        name=p.name,
        slug=slugify(p.name),
        capability=(p.major, p.minor),
        units=p.multi_processor_count,
        isa=f"sm_{p.major}{p.minor}",
        memory_bytes=p.total_memory,
        l2_bytes=int(getattr(p, "L2_cache_size", 0)),
    )


@lru_cache(maxsize=16)
def _cpu_facts(threads: int) -> DeviceFacts:
    name = cpu_name()
    return DeviceFacts(
        kind="cpu",
        name=name,
        slug=slugify(name),
        capability=(0, 0),
        units=threads,
        isa=torch.backends.cpu.get_cpu_capability(),
        memory_bytes=0,
        l2_bytes=0,
    )


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """The processor's model name as the operating system states it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if match:
            return match.group(1).strip()
    return platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def cpu_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the processor's last level of cache as the system states it; 0 where it does not."""
    found = [(0, 0)]
    for index in folder.glob("index*"):
        try:
            level, size = (index / "level").read_text(), (index / "size").read_text().strip()
            unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:], 1)
            found.append((int(level), int(size.rstrip("KMG")) * unit))
        except (OSError, ValueError):
            continue
    return max(found)[1]


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """What the processor can do, in Linux's words (``"avx512_bf16"``); empty elsewhere."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return frozenset(flags.group(1).split()) if flags else frozenset()


@lru_cache(maxsize=1)
def cpu_maker() -> str:
    """The processor's maker in Linux's words (``"AuthenticAMD"``); empty elsewhere."""
    return _cpu_fact("vendor_id")


@lru_cache(maxsize=1)
def cpu_family() -> int:
    """The maker's number of the processor's family; 0 where it is not told."""
    found = _cpu_fact("cpu family")
    return int(found) if found.isdecimal() else 0


def _cpu_fact(name: str) -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    found = re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else ""


def slugify(name: str) -> str:
    """``"NVIDIA H200"`` → ``"nvidia-h200"``: lower case, words joined by single dashes."""
    text = re.sub(r"\((r|tm)\)", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")
