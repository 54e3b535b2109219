"""What a measurement ran on: versions, device, driver, clocks, threads and flags, as plain data.

Every published row and every report carries this, so that a number can be judged and repeated.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fastlinear.core.device import cpu_cache_bytes, cpu_name, device_facts
from fastlinear.core.precision import float32_precision

# Environment variables that change speed or numbers; only those that are set are recorded.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_INTERPRET",
)
COMMIT_VARIABLE = "FASTLINEAR_COMMIT"
# The least and the newest version that the tests were run with.
TESTED = {"torch": ("2.11", "2.15"), "triton": ("3.6", "3.9"), "transformers": ("5.23", "5.24")}
_TIMEOUT_S = 10.0


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Facts about this process and ``device``, as a JSON-ready dict.

    Keys: ``python``, ``platform``, ``torch``, ``triton`` (None when not installed; never
    imported), ``fastlinear``, ``commit``, ``device`` (kind, name, slug, capability, units, isa,
    memory_bytes, l2_bytes), ``processor``, ``cache_bytes`` (its last
    level), ``cores``, ``threads``, ``load_1m``, ``flags``,
    ``variables``; on CUDA also ``cuda``, ``cudnn``, ``driver`` and ``clocks``. ``commit``,
    ``driver`` and ``clocks`` are None where they cannot be read. Asking about a CPU never
    initialises CUDA. Host names and paths are left out on purpose.
    """
    where = torch.device(device)
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "fastlinear": sys.modules["fastlinear"].__version__,
        "commit": os.environ.get(COMMIT_VARIABLE) or _commit(),
        "device": _jsonable(device_facts(where).to_json()),
        "processor": cpu_name(),
        "cache_bytes": cpu_cache_bytes(),
        "cores": _usable_cores(),
        "threads": torch.get_num_threads(),
        "load_1m": load_average(),
        "flags": {
            "float32_matmul_precision": float32_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "mkldnn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
            "mkl": torch.backends.mkl.is_available(),
        },
        "variables": {k: os.environ[k] for k in _VARIABLES if k in os.environ},
    }
    if where.type == "cuda":
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()
        facts |= _driver_and_clocks(where)
    return facts


def untested(versions: Mapping[str, str]) -> list[str]:
    """Packages, of those given with what is installed, outside of the versions in ``TESTED``."""

    def number(version: str) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", version)[:2]))

    return [
        f"{package} {versions[package]} (tested: {least} to {newest})"
        for package, (least, newest) in TESTED.items()
        if (found := number(versions.get(package, "")))
        and not number(least) <= found <= number(newest)
    ]


def load_average() -> float | None:
    """How many tasks the machine had to run over the last minute; None where it does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _jsonable(facts: dict[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in facts.items()}


@lru_cache(maxsize=8)
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@lru_cache(maxsize=1)
def _commit() -> str | None:
    """The commit of a source checkout, ``+changes`` when files differ; None when installed."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists() or not (root / "src" / "fastlinear").is_dir():
        return None
    head = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if head is None:
        return None
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--", "src")
    return f"{head}+changes" if changes else head


def _driver_and_clocks(device: torch.device) -> dict[str, Any]:
    """Driver version, current and top clocks (MHz), power (W) and heat (C) by ``nvidia-smi``."""
    names = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature")
    query = ("driver_version", *names[:-1], "temperature.gpu")
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = ("--id", f"GPU-{uuid}") if uuid is not None else ()
    line = _output(
        "nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader,nounits", *which
    )
    values = [v.strip() for v in line.splitlines()[0].split(",")] if line else []
    if len(values) != len(query):
        return {"driver": None, "clocks": None}
    return {"driver": values[0], "clocks": dict(zip(names, values[1:], strict=True))}


def _output(program: str, *arguments: str) -> str | None:
    """What a program prints, or None where it is missing, fails or hangs."""
    path = shutil.which(program)
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
