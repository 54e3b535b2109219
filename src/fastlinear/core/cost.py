"""Least work of an op (flops, bytes) and how near a measured time comes to what the machine can do.

Ceilings are measured on the machine at hand, never taken from a data sheet.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch

from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.timing import interleave

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}


@dataclass(frozen=True)
class Cost:
    """The least arithmetic and memory traffic of a computation.

    Attributes:
        flops: floating-point operations of the matrix products (a multiply-add counts two).
        bytes: each input read once and each output written once.
    """

    flops: float
    bytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of one device for one dtype.

    Attributes:
        flops_per_s: rate of a large matrix product.
        bytes_per_s: rate of a large copy, bytes read plus bytes written.
    """

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Roofline:
    """How one measured time relates to the ceilings.

    Attributes:
        floor_us: the least time the ceilings allow.
        bound: ``"compute"`` or ``"memory"``: which ceiling sets the floor.
        fraction: floor over measured time; 1.0 is the ceiling itself.
        flops_per_s, bytes_per_s: rates reached.
    """

    floor_us: float
    bound: str
    fraction: float
    flops_per_s: float
    bytes_per_s: float

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return asdict(self)


def floor_us(cost: Cost, ceilings: Ceilings) -> float:
    """The least microseconds the ceilings allow for this cost."""
    return max(cost.flops / ceilings.flops_per_s, cost.bytes / ceilings.bytes_per_s) * 1e6


def roofline(cost: Cost, ceilings: Ceilings, measured_us: float) -> Roofline:
    """Place a measured time under the roofline."""
    compute = cost.flops / ceilings.flops_per_s * 1e6
    memory = cost.bytes / ceilings.bytes_per_s * 1e6
    least = max(compute, memory)
    return Roofline(
        floor_us=least,
        bound="compute" if compute >= memory else "memory",
        fraction=least / measured_us,
        flops_per_s=cost.flops / measured_us * 1e6,
        bytes_per_s=cost.bytes / measured_us * 1e6,
    )


# Of bfloat16's rate, which is twice TF32's: three TF32 products carry a float32 product's digits.
_SPLIT_RATE = 1 / 6


@lru_cache(maxsize=32)
def measure_ceilings(device: str, dtype: str, precision: str = "n/a") -> Ceilings:
    """Measure the rate of a pass and of matrix products once per process (about a second).

    In float32 the rate is PyTorch's own or, on devices with tensor cores, what three TF32 products
    of the same digits may reach there, whichever is higher.

    Args:
        device: a torch device string.
        dtype: dtype name, for example ``"bfloat16"``.
        precision: the float32 matmul precision in force; part of the cache key only.
    """
    d = torch.device(device)
    torch_dtype = FLOAT_DTYPES[dtype]
    with torch.no_grad():
        source = torch.ones(_COPY_BYTES[d.type], dtype=torch.uint8, device=d)
        target = torch.empty_like(source)
        # in a CUDA graph the copy is a transfer, at two thirds of what a kernel reads and writes
        arms = {"copy": lambda: target.copy_(source)}
        if d.type == "cuda":
            words, written = source.view(torch.int32), target.view(torch.int32)
            arms["kernel"] = lambda: torch.neg(words, out=written)
        passes = interleave(arms, device=d, metric="device", rounds=7)
        best_flops = _product_rate(d, torch_dtype)
        if _has_split_products(d, torch_dtype):
            split = _product_rate(d, torch.bfloat16) * _SPLIT_RATE
            best_flops = max(best_flops, split)
    fastest = min(min(s.us) for s in passes.values())
    return Ceilings(best_flops, 2.0 * source.numel() / fastest * 1e6)


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Flops per second of the fastest of PyTorch's square products."""
    cuda, best = device.type == "cuda", 0.0
    for n in _product_sizes(cuda, dtype):
        generator = torch.Generator(device=device).manual_seed(0)
        a = torch.randn(n, n, device=device, generator=generator).to(dtype)
        arms = {"mm": lambda a=a: torch.mm(a, a)}
        if not cuda and _onednn_multiplies(dtype):
            arms["onednn"] = lambda a=a: torch.ops.mkldnn._linear_pointwise(
                a, a, None, "none", [], ""
            )
        times = interleave(arms, device=device, metric="device", rounds=5)
        fastest = min(min(s.us) for s in times.values())
        best = max(best, 2.0 * n**3 / fastest * 1e6)
    return best


def _has_split_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether float32 products may be sums of three products in TF32."""
    if device.type != "cuda" or dtype is not torch.float32:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of this dtype on this processor."""
    ops = torch.ops.mkldnn
    if not hasattr(ops, "_linear_pointwise"):
        return False
    if dtype is torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(ops._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def _product_sizes(cuda: bool, dtype: torch.dtype) -> tuple[int, ...]:
    """Square products that reach the device's rate without taking seconds."""
    if cuda:
        return (2048,) if dtype is torch.float64 else (2048, 4096, 8192)
    # 16-bit products are emulated on many processors: a small one tells as much
    return (1024, 2048) if dtype is torch.float32 else (512,)
