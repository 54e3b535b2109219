"""What experiment ``pseudo-linear`` should show: a model of the machine, measured, not fitted.

The device takes the longer of two times: arithmetic at the measured rate of large matrix products,
and memory traffic at the measured rate of a copy of x's own size; on a GPU each kernel adds its
start, the time of a kernel that does nothing in a row of such. What the host does for a call is
measured on the same call at 1 x 16 numbers: on a GPU it runs beside the device, so that the longer
counts, on a CPU before it. Hence a full layer costs as much as a diagonal one while both wait for
the host or for memory, and K / ridge times as much from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.timing import interleave
from fastlinear.ops.diagonal_linear.op import diagonal_linear

if TYPE_CHECKING:
    from fastlinear.bench.pseudo_linear import DiagonalWork

LINEAR = "linear"
_ROUNDS = 5
_FULL_SIZE = {"cuda": 4096, "cpu": 1024}  # of the square product whose rate is taken
_LEAST_COPY, _MOST_COPY = 1 << 16, 1 << 28  # bytes


@dataclass(frozen=True)
class Machine:
    """Measured rates of one device for one dtype.

    Attributes:
        flops_per_s: of a large matrix product by PyTorch.
        bytes_per_s: of copies to new memory of a tensor as large as x, read plus written.
        kernel_us: the start of a kernel on the device, 0 on a CPU.
        host_us: contender → what the host takes for a call, whatever its size.
    """

    flops_per_s: float
    bytes_per_s: float
    kernel_us: float
    host_us: Mapping[str, float]


@dataclass(frozen=True)
class Expected:
    """An expected time and what it consists of, in microseconds.

    Attributes:
        compute, memory: of the device, kernel starts aside.
        start: of its kernels.
        host: of the host.
    """

    compute: float
    memory: float
    start: float
    host: float

    @property
    def device_us(self) -> float:
        """Time on the device."""
        return max(self.compute, self.memory) + self.start

    @property
    def wall_us(self) -> float:
        """Time of back-to-back calls."""
        beside = self.start > 0.0  # a CPU is its own host
        return max(self.device_us, self.host) if beside else self.device_us + self.host

    @property
    def bound(self) -> str:
        """What the call waits for longest."""
        if self.host >= self.device_us:
            return "the host"
        return "arithmetic" if self.compute >= self.memory else "memory"


def expected(contender: str, m: int, k: int, dtype: str, grad: bool, machine: Machine) -> Expected:
    """The expected time of ``linear`` or of fastlinear's diagonal layer, forward or training."""
    size = FLOAT_DTYPES[dtype].itemsize
    if contender == LINEAR:
        # forward; dx = dy W, dW = dyᵀ x and db, each reading its operands
        passes, matrices, products, kernels = (7, 3, 3, 5) if grad else (2, 1, 1, 1)
    else:
        passes, matrices, products, kernels = (5, 0, 0, 3) if grad else (2, 0, 0, 1)
    return Expected(
        compute=products * 2.0 * m * k * k / machine.flops_per_s * 1e6,
        memory=size * (passes * m * k + matrices * k * k) / machine.bytes_per_s * 1e6,
        start=kernels * machine.kernel_us,
        host=machine.host_us[contender],
    )


def told(work: DiagonalWork, contender: str) -> dict[str, str]:
    """The expected times of a case, as its rows publish them."""
    case, x = work.case, work.stacks[0].x
    m, k = case.dim("M"), case.dim("K")
    held = x.nbytes if work.cold or not x.is_cuda else x.nbytes * len(work.stacks)
    rates = measured(str(x.device), case.dtype, held, case.needs_grad)
    found = expected(contender, m, k, case.dtype, case.needs_grad, rates)
    return {
        "expected wall us": f"{found.wall_us:.2f}",
        "expected device us": f"{found.device_us:.2f}",
        "expected bound": found.bound,
    }


@dataclass(frozen=True)
class Expectation:
    """What a machine makes of one diagonal layer against a full one.

    Attributes:
        m, k, dtype, device, grad: the call; ``grad`` for forward and backward.
        linear, ours: the expected times of each.
        machine: the rates they follow from.
    """

    m: int
    k: int
    dtype: str
    device: str
    grad: bool
    linear: Expected
    ours: Expected
    machine: Machine

    @property
    def speedup(self) -> float:
        """Of the diagonal layer over the full one, on the wall clock."""
        return self.linear.wall_us / self.ours.wall_us

    @property
    def breakeven(self) -> float:
        """The width from which a full layer waits for its arithmetic rather than for memory."""
        products, passes = (3, 7) if self.grad else (1, 2)
        size = FLOAT_DTYPES[self.dtype].itemsize
        ridge = self.machine.flops_per_s / self.machine.bytes_per_s
        return ridge * passes * size / (2.0 * products)

    def in_words(self) -> str:
        """The same as a few sentences."""
        what = "forward and backward" if self.grad else "forward"
        rates = self.machine
        fewer = f"A diagonal of {self.k} needs {self.k} times fewer multiplications than a matrix"
        lines = [
            f"{fewer}; expect {self.speedup:.2f}x ({what}, {self.m} rows, {self.dtype}).",
            f"  nn.Linear: {self._times(self.linear)}",
            f"  diagonal:  {self._times(self.ours)}",
            f"  measured here: {rates.flops_per_s / 1e12:.3g} TFLOP/s in large products, "
            f"{rates.bytes_per_s / 1e9:.3g} GB/s in copies of this size.",
            f"  Both layers read and write all of x and y. Up to about {self.breakeven:.0f} "
            "features nn.Linear's multiplications hide behind that; from there on its time grows "
            "with the width, and so does the speed-up, without end.",
        ]
        if self.ours.bound == "the host":
            lines.append(
                "  Here the diagonal layer waits for the host: a CUDA graph, or more rows at once, "
                "would show more of the device."
                if self.ours.start
                else "  Here the call itself is most of the diagonal layer's time: more rows at "
                "once would show more."
            )
        return "\n".join(lines)

    @staticmethod
    def _times(e: Expected) -> str:
        parts = f"arithmetic {e.compute:.3g}, memory {e.memory:.3g}, host {e.host:.3g}"
        starts = f", kernel starts {e.start:.3g}" if e.start else ""
        return f"{e.wall_us:.3g} us ({parts}{starts}): waits for {e.bound}"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {
            **asdict(self),
            "speedup": self.speedup,
            "breakeven_width": self.breakeven,
            "linear_us": self.linear.wall_us,
            "diagonal_us": self.ours.wall_us,
        }


def expectation(m: int, k: int, dtype: str, device: str, grad: bool) -> Expectation:
    """Measure this machine (a second or two, once a process) and expect."""
    rates = measured(device, dtype, m * k * FLOAT_DTYPES[dtype].itemsize, grad)
    linear, ours = (expected(name, m, k, dtype, grad, rates) for name in (LINEAR, "fastlinear"))
    return Expectation(m, k, dtype, device, grad, linear, ours, rates)


# --------------------------------------------------------------------------------------------
# Measuring the machine


def measured(device: str, dtype: str, x_bytes: int, grad: bool) -> Machine:
    """The machine's rates for tensors of ``x_bytes``; each is measured once a process."""
    size = _LEAST_COPY
    while size < min(x_bytes, _MOST_COPY):
        size *= 2
    state = f"{matmul_precision(FLOAT_DTYPES[dtype])} {torch.get_num_threads()}"
    return Machine(
        _product_rate(device, dtype, state),
        _copy_rate(device, size, state),
        _kernel_us(device),
        _host_us(device, dtype, grad, state),
    )


@lru_cache(maxsize=32)
def _product_rate(device: str, dtype: str, state: str) -> float:
    where = torch.device(device)
    n = _FULL_SIZE[where.type]
    a, b = (torch.randn(n, n, device=where).to(FLOAT_DTYPES[dtype]) for _ in range(2))
    return 2.0 * n**3 / _best_us(lambda: torch.mm(a, b), where, "device") * 1e6


@lru_cache(maxsize=64)
def _copy_rate(device: str, size: int, state: str) -> float:
    """Of copies to new memory: what a fresh result costs is part of every contender."""
    where = torch.device(device)
    source = torch.ones(size // 4, device=where)
    sets = [source, *(source.clone() for _ in range(3 if where.type == "cuda" else 0))]
    turn = [0]

    def copy() -> Tensor:
        turn[0] = (turn[0] + 1) % len(sets)
        return sets[turn[0]].clone()

    us = _best_us(copy, where, "device") - _kernel_us(device)
    return 2.0 * size / max(us, 1e-3) * 1e6


@lru_cache(maxsize=8)
def _kernel_us(device: str) -> float:
    where = torch.device(device)
    if where.type == "cpu":
        return 0.0
    x = torch.zeros(1, device=where)

    def row() -> None:
        for _ in range(20):
            x.add_(1.0)

    return _best_us(row, where, "device") / 20


@lru_cache(maxsize=32)
def _host_us(device: str, dtype: str, grad: bool, state: str) -> Mapping[str, float]:
    where, kind = torch.device(device), FLOAT_DTYPES[dtype]
    x, dy = (torch.randn(1, 16, device=where).to(kind) for _ in range(2))
    full, diagonal, bias = (torch.randn(s, device=where).to(kind) for s in ((16, 16), 16, 16))
    leaves = [t.requires_grad_(grad) for t in (x, full, diagonal, bias)]
    calls: dict[str, Callable[[], Tensor]] = {
        LINEAR: lambda: F.linear(x, full, bias),
        "fastlinear": lambda: diagonal_linear(x, diagonal, bias),
    }
    weights = {LINEAR: leaves[1], "fastlinear": leaves[2]}

    def arm(name: str) -> Callable[[], Any]:
        run, wanted = calls[name], (x, weights[name], bias)
        return (lambda: torch.autograd.grad(run(), wanted, dy)) if grad else run

    with torch.set_grad_enabled(grad):
        samples = interleave(
            {name: arm(name) for name in calls}, device=where, metric="wall", rounds=_ROUNDS
        )
    return {name: s.median_us for name, s in samples.items()}


def _best_us(run: Callable[[], Any], where: torch.device, metric: str) -> float:
    with torch.no_grad():
        samples = interleave({"it": run}, device=where, metric=metric, rounds=_ROUNDS)
    return min(samples["it"].us)
