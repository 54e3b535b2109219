"""What experiment ``pseudo-linear`` should show: a model of the machine, measured, not fitted.

A full layer takes what its products take at the rates PyTorch reaches at their size, or its memory
traffic where that is longer, and then what follows them: an activation, sums for db. A diagonal
layer takes its passes over memory, as many as the backend needs that computes it, and those over
its parameters, which a single row does not outweigh. Rates of memory are those of one pass as
large; on a GPU kernels add their starts, on a CPU, where caches, threads and the first touch of new
results decide what a pass takes, the layer's products and the backend's own passes are timed one
after the other, into new tensors. What the host does for a call is measured on the same call of
few numbers, on a GPU up to 64 rows of 64: there it runs beside the device, so that the longer
counts, on a CPU, where it is 1 row of 16, before it.
Hence a full layer costs as much as a diagonal one while both wait for the host or for memory, and
ever more times as much from there on.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.contenders.diagonal_machine import LINEAR, OURS, Machine, measured
from benchmarks.contenders.diagonal_work import DiagonalWork
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.dispatch.steps import choices_of
from fastlinear.ops.diagonal_linear.backends import problem
from fastlinear.ops.diagonal_linear.problem import STEP

_MANY_SETS = 64
_LEAST_US = 0.05  # that is told


@dataclass(frozen=True)
class Passes:
    """What a backend's pieces do.

    Attributes:
        passes: over tensors of x's size, read or written.
        kernels: of PyTorch's, that start one after the other.
        new: tensors of x's size.
        sums: over the rows of one, by PyTorch.
    """

    passes: int
    kernels: int
    new: int
    sums: int = 0

    def __add__(self, other: Passes) -> Passes:
        return Passes(
            self.passes + other.passes,
            self.kernels + other.kernels,
            self.new + other.new,
            self.sums + other.sums,
        )


_ONE_PASS = Passes(2, 0, 1)
_FORWARDS = {"eager": Passes(4, 0, 2), "addcmul": _ONE_PASS}
_BACKWARDS = {"eager": Passes(6, 0, 2, 2)}  # dx, dy ∘ x, and the sums of that and of dy
_SWEEP = Passes(3, 0, 1)
_ACT_IN_PLACE, _ACT, _ACT_GRAD = Passes(2, 1, 0), Passes(2, 1, 1), Passes(3, 1, 1)


@dataclass(frozen=True)
class Expected:
    """An expected time and what it consists of, in microseconds.

    Attributes:
        compute, memory: of the device's products and of their traffic, which overlap.
        after: of what follows, or is no matter of overlapping.
        start: of its kernels.
        host: of the host.
    """

    compute: float
    memory: float
    after: float
    start: float
    host: float

    @property
    def device_us(self) -> float:
        """Time on the device."""
        return max(self.compute, self.memory) + self.after + self.start

    @property
    def wall_us(self) -> float:
        """Time of back-to-back calls."""
        beside = self.start > 0.0  # a CPU is its own host, and starts no kernels
        return max(self.device_us, self.host) if beside else self.device_us + self.host

    @property
    def bound(self) -> str:
        """What the call waits for longest."""
        if self.host >= self.device_us:
            return "the host"
        return "arithmetic" if self.compute >= self.memory else "memory"


def expected(
    contender: str,
    m: int,
    k: int,
    dtype: str,
    grad: bool,
    machine: Machine,
    activation: str = "none",
    backends: tuple[str, str] = ("", ""),
) -> Expected:
    """The expected time of ``linear`` or of fastlinear's diagonal layer, forward or training.

    Args:
        backends: fastlinear's, for forward and backward; one pass each where not named here.
    """
    size = FLOAT_DTYPES[dtype].itemsize
    acts = activation != "none"
    pass_us = _passing_us(size * m * k, machine.bytes_per_s)
    if contender == LINEAR:
        # forward; dx = dy W, dW = dyᵀ x and db, each reading its operands
        passes, matrices, kernels, new = (6, 3, 4, 2) if grad else (2, 1, 1, 1)
        rest = Passes(0, kernels, new, int(grad)) if machine.layer_us is None else Passes(0, 0, 0)
        rest += _ACT if acts else Passes(0, 0, 0)
        rest += _ACT_GRAD if acts and grad else Passes(0, 0, 0)
        compute = sum(machine.products_us[: 3 if grad else 1])
        weight_us = _passing_us(size * k * k, machine.weight_bytes_per_s)
        memory = pass_us * passes + weight_us * matrices
        if machine.layer_us is not None:  # both at once, of which the longer is named
            compute = 2.0 * m * k * k * (3 if grad else 1) / machine.flops_per_s * 1e6
            if memory > compute:
                compute, memory = min(compute, machine.layer_us), machine.layer_us
            else:
                compute, memory = machine.layer_us, min(memory, machine.layer_us)
        start = rest.kernels * machine.kernel_us
        after = pass_us * rest.passes
    else:
        rest = _FORWARDS.get(backends[0], _ONE_PASS)
        if acts and backends[0] in _FORWARDS:
            rest += _ACT if backends[0] == "eager" else _ACT_IN_PLACE
        if grad:
            rest += _BACKWARDS.get(backends[1], _SWEEP)
            rest += _ACT_GRAD if acts and backends[1] in _BACKWARDS else Passes(0, 0, 0)
        parameters = 2 + ((3 + acts) if grad else 0)  # w and b; again, and dw and db
        compute, memory, after = 0.0, pass_us * (rest.passes + parameters / m), 0.0
        if machine.passes_us is not None:
            memory, rest = machine.passes_us, Passes(0, 0, 0)
        start = machine.call_us
    return Expected(
        compute=compute,
        memory=memory,
        after=after + machine.new_us * rest.new + machine.sum_us * rest.sums,
        start=start,
        host=machine.host_us[contender],
    )


def _passing_us(size: int, rate: float | None) -> float:
    return 0.0 if rate is None else size / rate * 1e6


def told(work: DiagonalWork, contender: str) -> dict[str, str]:
    """The expected times of a case, as its rows publish them."""
    case = work.case
    linear, ours, _ = _both(
        case.dim("M"),
        case.dim("K"),
        case.dtype,
        str(work.stacks[0].x.device),
        case.needs_grad,
        case.option("activation"),
        len(work.stacks),
        case.name,
    )
    found = linear if contender == LINEAR else ours
    return {
        "expected wall us": f"{found.wall_us:.2f}",
        "expected device us": f"{found.device_us:.2f}",
        "expected bound": found.bound,
    }


def _both(
    m: int,
    k: int,
    dtype: str,
    device: str,
    grad: bool,
    activation: str,
    sets: int,
    when: str = "",
    backend: str | None = None,
) -> tuple[Expected, Expected, Machine]:
    kind = device.split(":")[0]
    p = problem("forward", m, k, dtype=dtype, device=kind, activation=activation, needs_grad=grad)
    names = [c.backend.name for c in choices_of(p, backend) if c.problem.piece != STEP]
    backends = names[0], names[-1]
    machine = measured(device, dtype, m, k, activation, grad, backends, sets, when)
    linear, ours = (
        expected(name, m, k, dtype, grad, machine, activation, backends) for name in (LINEAR, OURS)
    )
    return linear, ours, machine


@dataclass(frozen=True)
class Expectation:
    """What a machine makes of one diagonal layer against a full one.

    Attributes:
        m, k, dtype, device, grad: the call; ``grad`` for forward and backward.
        linear, ours: the expected times of each.
        machine: the rates they follow from.
        activation: of both.
    """

    m: int
    k: int
    dtype: str
    device: str
    grad: bool
    linear: Expected
    ours: Expected
    machine: Machine
    activation: str = "none"

    @property
    def speedup(self) -> float:
        """Of the diagonal layer over the full one, on the wall clock."""
        return self.linear.wall_us / self.ours.wall_us

    @property
    def breakeven(self) -> float | None:
        """The width from which a full layer waits for its arithmetic rather than for memory; None
        where the passes of this size take too little to be timed."""
        if self.machine.bytes_per_s is None:
            return None
        products, passes = (3, 6) if self.grad else (1, 2)
        size = FLOAT_DTYPES[self.dtype].itemsize
        ridge = self.machine.flops_per_s / self.machine.bytes_per_s
        return ridge * passes * size / (2.0 * products)

    def in_words(self) -> str:
        """The same as a few sentences."""
        what = "forward and backward" if self.grad else "forward"
        what += "" if self.activation == "none" else f" with {self.activation}"
        rates, breakeven = self.machine, self.breakeven
        fewer = f"A diagonal of {self.k} needs {self.k} times fewer multiplications than a matrix"
        lines = [
            f"{fewer}; expect {self.speedup:.2f}x ({what}, {self.m} rows, {self.dtype}).",
            f"  nn.Linear: {self._times(self.linear)}",
            f"  diagonal:  {self._times(self.ours)}",
        ]
        measured = f"  measured here: {rates.flops_per_s / 1e12:.3g} TFLOP/s in large products"
        if rates.bytes_per_s is None or breakeven is None:
            lines.append(
                f"{measured}; a pass over so few numbers takes no longer than a bare call."
            )
        else:
            lines += [
                f"{measured}, {rates.bytes_per_s / 1e9:.3g} GB/s in passes of this size.",
                "  Both layers read and write all of x and y. Up to about "
                f"{breakeven:.0f} features nn.Linear's multiplications hide behind that; beyond it "
                "its time grows with the width, and so does the speed-up, without end.",
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

    def _times(self, e: Expected) -> str:
        """An expected time and its parts: on a CPU those that are timed together as one."""
        rates = self.machine
        if e is self.linear and rates.layer_us is not None:
            parts = [("products and new results, timed", max(e.compute, e.memory))]
        elif e is self.ours and rates.passes_us is not None:
            parts = [("passes and new results, timed", e.memory)]
        else:
            products = [] if e is self.ours else [("arithmetic", e.compute)]
            parts = [*products, ("memory", e.memory)]
        parts += [("after that", e.after)] if e.after else []
        parts += [("kernel starts", e.start)] if e.start else []
        parts.append(("the call" if rates.layer_us is not None else "host", e.host))
        told = "; ".join(f"{name} {_us(us)}" for name, us in parts)
        waits = e.bound
        if waits == "the host" and rates.layer_us is not None:
            waits = "the call itself"
        return f"{_us(e.wall_us)} us ({told}): waits for {waits}"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {
            **asdict(self),
            "speedup": self.speedup,
            "breakeven_width": self.breakeven,
            "linear_us": self.linear.wall_us,
            "diagonal_us": self.ours.wall_us,
        }


def _us(us: float) -> str:
    return f"{us:.3g}" if us >= _LEAST_US else f"under {_LEAST_US}"


def expectation(
    m: int,
    k: int,
    dtype: str,
    device: str,
    grad: bool,
    activation: str = "none",
    backend: str | None = None,
) -> Expectation:
    """Measure this machine (a second or two, once a process) and expect, of layers with a bias.

    Args:
        backend: of the diagonal layer's forward; None where fastlinear chooses.
    """
    linear, ours, rates = _both(m, k, dtype, device, grad, activation, _MANY_SETS, backend=backend)
    return Expectation(m, k, dtype, device, grad, linear, ours, rates, activation)
