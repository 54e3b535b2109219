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

from dataclasses import dataclass

from benchmarks.contenders.diagonal_machine import LINEAR, Machine, measured
from benchmarks.contenders.diagonal_work import DiagonalWork
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.dispatch.steps import choices_of
from fastlinear.families.diagonal.backends import problem
from fastlinear.families.diagonal.problem import STEP


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
    sizes, activation = (case.dim("M"), case.dim("K")), case.option("activation")
    p = problem(
        *("forward", *sizes),
        dtype=case.dtype,
        device=case.device,
        activation=activation,
        needs_grad=case.needs_grad,
    )
    names = [c.backend.name for c in choices_of(p) if c.problem.piece != STEP]
    backends = names[0], names[-1]
    place = str(work.stacks[0].x.device)
    what = place, case.dtype, *sizes, activation, case.needs_grad, backends
    machine = measured(*what, len(work.stacks), case.name)
    call = *sizes, case.dtype, case.needs_grad, machine, activation, backends
    found = expected(contender, *call)
    return {
        "expected wall us": f"{found.wall_us:.2f}",
        "expected device us": f"{found.device_us:.2f}",
        "expected bound": found.bound,
    }
