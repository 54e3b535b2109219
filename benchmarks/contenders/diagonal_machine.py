"""The rates of this machine that experiment ``pseudo-linear``'s model is made of, measured.

Each is measured at the size of the case it is for, on a GPU once a process: matrix products by
their rate at that size, passes over memory by one of PyTorch's over as many bytes. Products that
would take long are measured smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.device import device_facts
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.timing import Samples, interleave
from fastlinear.families.diagonal.backends import FAMILY
from fastlinear.families.diagonal.cpu import cpp
from fastlinear.families.diagonal.op import diagonal_linear
from fastlinear.fastpath import lookup

LINEAR, OURS = "linear", "fastlinear"
_ROUNDS = 7
_FULL_SIZE = {"cuda": 4096, "cpu": 1024}  # of the square product whose rate is told
_MOST_FLOPS = {"cuda": 5e11, "cpu": 1e10}  # of a product that is measured as it is
_LEAST_ROWS, _LEAST_WIDTH = 512, 1024  # no product is measured smaller for its flops
_LEAST_COPY, _MOST_COPY = 1 << 12, 1 << 28  # bytes
_OTHERS = 1 << 28  # bytes that other contenders leave in a CPU's caches
_HOST_SIZE = (64, 64)  # at most: PyTorch calls a product of few rows otherwise
_LEAST_TOUCHED, _MOST_TOUCHED = 1 << 20, 1 << 23  # bytes that push the host's own out of them
_MAX_SETS = 64
_REPEATS = 0.1  # of a call's time, within which timings of it lie


@dataclass(frozen=True)
class Machine:
    """Measured rates of one device for one case.

    Attributes:
        flops_per_s: of a large matrix product by PyTorch.
        products_us: on a GPU the full layer's three products, of this size, into memory that is
            there: forward, dx, dw.
        layer_us: on a CPU the same and the sum for db, as a step runs them, into new tensors; None
            on a GPU.
        sum_us: PyTorch's sum over rows, as for the full layer's db on a GPU, and eager's.
        bytes_per_s: of a pass of PyTorch's as large as the case, read plus written, to memory that
            is there; None where the pass takes too little of its call to be told from it.
        weight_bytes_per_s: the same for the full layer's weight, which caches may hold.
        new_us: what a new tensor of x's size costs when it is first written.
        kernel_us: the start of a kernel of PyTorch's on the device, 0 on a CPU.
        call_us: fastlinear's kernels on at most 64 rows of 16 features, in training of 128, on the
            device, with tensors that its caches do not hold; 0 on a CPU.
        passes_us: fastlinear's passes, of this size, into new tensors; None where they take what
            a pass of PyTorch's takes, and new tensors what they take.
        host_us: contender → what the host takes for a call; in training on a CPU beside as much
            memory as the step touches, which pushes the host's own code and data out of caches.
    """

    flops_per_s: float
    products_us: tuple[float, float, float]
    layer_us: float | None
    sum_us: float
    bytes_per_s: float | None
    weight_bytes_per_s: float | None
    new_us: float
    kernel_us: float
    call_us: float
    passes_us: float | None
    host_us: Mapping[str, float]


def measured(
    device: str,
    dtype: str,
    m: int,
    k: int,
    activation: str,
    grad: bool,
    backends: tuple[str, str],
    sets: int,
    when: str,
) -> Machine:
    """The machine for one case.

    Args:
        backends: those that fastlinear takes for forward and backward; the host is timed with calls
            of the latter in training.
        sets: input sets that take turns, which decide what caches hold.
        when: anything; a host is measured again where this differs, as others may share it.
    """
    size = m * k * FLOAT_DTYPES[dtype].itemsize
    held = 2 * size if grad else size  # a step touches twice the tensors of a forward
    state = f"{matmul_precision(FLOAT_DTYPES[dtype])} {torch.get_num_threads()}"
    cuda = device.startswith("cuda")
    state += "" if cuda else when
    rate = _pass_rate(device, _rounded(held), k, sets, state)
    small = (min(m, 64), min(k, 128) if grad else 16)  # sums take more of a program than a pass
    if m == 1:  # what such a program takes is the way to memory, with all that it asks for
        small = (1, min(k, 2048))
    backend = backends[1] if grad else backends[0]
    fresh = _first_touch_us(device, size, 2 if grad else 1, state)
    beside = grad and not cuda  # a forward's call is part of what is timed at its size
    return Machine(
        _product_rate(device, dtype, state),
        (
            _product_us(device, dtype, m, k, "forward with bias", state) if cuda else 0.0,
            _product_us(device, dtype, m, k, "dx", state) if cuda and grad else 0.0,
            _product_us(device, dtype, m, k, "dw", state) if cuda and grad else 0.0,
        ),
        None if cuda else _layer_us(dtype, m, k, grad, state),
        _sum_us(device, dtype, m, k, state) if grad else 0.0,
        rate,
        _pass_rate(device, _rounded(size * k // m), k, 1, state) if cuda else rate,
        fresh,
        _kernel_us(device),
        _call_us(device, dtype, activation, grad, backend, small, sets) if cuda else 0.0,
        None if cuda else _passes_us(dtype, m, k, activation, grad, backends, state),
        _host_us(
            *(device, dtype, activation, grad, backend),
            (_touched(2 * held + 2 * (size * k // m)), _touched(2 * held)) if beside else (),
            (min(m, _HOST_SIZE[0]), min(k, _HOST_SIZE[1])) if cuda else (1, 16),
            f"{state} {when}",
        ),
    )


def _touched(size: int) -> int:
    """Bytes to write between two calls of the host's, 0 for so few that it would not notice."""
    return 0 if size < _LEAST_TOUCHED else min(_rounded(size), _MOST_TOUCHED)


def _rounded(size: int) -> int:
    found = _LEAST_COPY
    while found < min(size, _MOST_COPY):
        found *= 2
    return found


# --------------------------------------------------------------------------------------------
# The device


@lru_cache(maxsize=32)
def _product_rate(device: str, dtype: str, state: str) -> float:
    n = _FULL_SIZE[torch.device(device).type]
    return 2.0 * n**3 / _product_us(device, dtype, n, n, "forward", state) * 1e6


@lru_cache(maxsize=512)
def _product_us(device: str, dtype: str, m: int, k: int, piece: str, state: str) -> float:
    """One product of a full layer of K features over M rows, in microseconds."""
    where = torch.device(device)
    rows, width = _shrunk(where.type, m, k)
    kind = FLOAT_DTYPES[dtype]
    x, dy = (torch.randn(rows, width, device=where).to(kind) for _ in range(2))
    w = torch.randn(width, width, device=where).to(kind)
    bias = torch.randn(width, device=where).to(kind)
    out = torch.empty_like(w if piece == "dw" else x)
    run: Callable[[], Tensor] = {
        "forward": lambda: torch.mm(x, w.t(), out=out),
        "forward with bias": lambda: torch.addmm(bias, x, w.t(), out=out),
        "dx": lambda: torch.mm(dy, w, out=out),
        "dw": lambda: torch.mm(dy.t(), x, out=out),
    }[piece]
    us = max(_timed_us(run, where) - _kernel_us(device), 1e-3)
    return us * (m * k**2) / (rows * width**2)


def _shrunk(kind: str, m: int, k: int) -> tuple[int, int]:
    """Rows and features of a product to measure for one of M rows of K."""
    rows, width = m, k
    while 2.0 * rows * width**2 > _MOST_FLOPS[kind]:
        if width > _LEAST_WIDTH and width * 4 >= rows:
            width //= 2
        elif rows > _LEAST_ROWS:
            rows //= 2
        else:
            break
    return rows, width


@lru_cache(maxsize=64)
def _layer_us(dtype: str, m: int, k: int, grad: bool, state: str) -> float:
    """A full layer's products on the CPU and, in training, its sum, into new tensors: beyond what
    they cost on 1 x 16 numbers, which is the host's."""
    rows, width = _shrunk("cpu", m, k)
    arms = {"it": _layer(rows, width, dtype, grad), "few": _layer(1, 16, dtype, grad)}
    with torch.no_grad():
        samples = interleave(arms, rounds=_ROUNDS)
    us = max(_quiet_us(samples["it"]) - _quiet_us(samples["few"]), 1e-3)
    return us * (m * k**2) / (rows * width**2)


def _layer(rows: int, width: int, dtype: str, grad: bool) -> Callable[[], Any]:
    kind = FLOAT_DTYPES[dtype]
    x, dy = (torch.randn(rows, width).to(kind) for _ in range(2))
    w, bias = torch.randn(width, width).to(kind), torch.randn(width).to(kind)
    if not grad:
        return lambda: F.linear(x, w, bias)
    return lambda: (F.linear(x, w, bias), dy.mm(w), dy.t().mm(x), dy.sum(0))


@lru_cache(maxsize=128)
def _sum_us(device: str, dtype: str, m: int, k: int, state: str) -> float:
    """PyTorch's sum of M rows of K numbers."""
    where, rows = torch.device(device), m
    while rows * k > _MOST_COPY // 4 and rows > 1:
        rows //= 2
    x = torch.randn(rows, k, device=where).to(FLOAT_DTYPES[dtype])
    return max(_timed_us(lambda: x.sum(0), where) - _kernel_us(device), 1e-3) * m / rows


@lru_cache(maxsize=64)
def _pass_rate(device: str, size: int, width: int, sets: int, state: str) -> float | None:
    """Of one op of PyTorch's, from ``size`` bytes to memory that is there, as a case meets it.

    On a GPU a product with a number, from as many sources as the case has sets; on a CPU a product
    with ``width`` numbers, by turns with one on other memory.
    """
    where = torch.device(device)
    if where.type == "cuda":
        enough = math.ceil(2 * device_facts(where).l2_bytes / size)
        count = max(1, min(sets, enough, _MAX_SETS))
        pairs = [[torch.ones(size // 4, device=where) for _ in range(2)] for _ in range(count)]
        turn = [0]

        def rotating() -> Tensor:
            turn[0] = (turn[0] + 1) % count
            source, target = pairs[turn[0]]
            return torch.mul(source, 0.5, out=target)

        return _rate(2.0 * size, _timed_us(rotating, where), _kernel_us(device))
    rows = max(1, size // (4 * width))
    a, b, c, d = (torch.ones(rows, width) for _ in range(4))
    few, weight = [torch.ones(1, 16) for _ in range(2)], torch.ones(width)
    arms = {
        "it": lambda: torch.mul(a, weight, out=b),
        "few": lambda: torch.mul(few[0], few[0][0], out=few[1]),
        "other": lambda: torch.mul(c, weight, out=d),
    }
    with torch.no_grad():
        samples = interleave(arms, rounds=_ROUNDS)
    return _rate(8.0 * rows * width, _quiet_us(samples["it"]), _quiet_us(samples["few"]))


def _rate(moved: float, us: float, call_us: float) -> float | None:
    """Bytes a second of a call that moved so many, beyond one that moves next to none; None where
    the two take the same, as far as timings repeat."""
    beyond = us - call_us
    return moved / beyond * 1e6 if beyond > _REPEATS * call_us else None


@lru_cache(maxsize=64)
def _first_touch_us(device: str, size: int, alive: int, state: str) -> float:
    """What writing a new tensor of ``size`` bytes costs beyond writing one that is there, where so
    many are alive at a time: the memory of more than one goes back to the system sooner."""
    where = torch.device(device)
    if where.type == "cuda":  # PyTorch's allocator keeps memory at hand
        return 0.0
    count = max(1, min(size, _MOST_COPY) // 4)
    x = torch.ones(count)
    there = [torch.empty_like(x) for _ in range(alive)]
    arms: dict[str, Callable[[], Any]] = {
        "new": lambda: [x.clone() for _ in range(alive)],
        "there": lambda: [y.copy_(x) for y in there],
    }
    with torch.no_grad():
        samples = interleave(arms, rounds=_ROUNDS)
    more = _quiet_us(samples["new"]) - _quiet_us(samples["there"])
    return max(0.0, more) / alive * size / (4 * count)


@lru_cache(maxsize=64)
def _passes_us(
    dtype: str,
    m: int,
    k: int,
    activation: str,
    grad: bool,
    backends: tuple[str, str],
    state: str,
) -> float | None:
    """fastlinear's passes of this size on the CPU, one after the other as a step runs them.

    Into new tensors: whether the system takes the memory of old ones back between two calls depends
    on all that the process has had before, and decides what the next ones cost.
    """
    if grad and backends != ("cpp", "cpp"):
        return None
    rows = m
    while rows * k > _MOST_COPY // 4 and rows > 1:
        rows //= 2
    found = []
    others = torch.ones(_OTHERS // 4)
    for _ in range(2):  # pages that new memory gets come in good and bad spells
        it, few = (_passes(n, dtype, activation, grad, backends[0]) for n in ((rows, k), (1, 16)))
        arms = {"other": lambda: others.mul_(1.0), "it": it, "few": few}  # caches hold other things
        with torch.no_grad():
            samples = interleave(arms, rounds=_ROUNDS)
        found.append(_quiet_us(samples["it"]) - _quiet_us(samples["few"]))
    return max(min(found), 1e-3) * m / rows


def _passes(
    size: tuple[int, int], dtype: str, activation: str, grad: bool, backend: str
) -> Callable[[], Any]:
    kind = FLOAT_DTYPES[dtype]
    x, dy = (torch.randn(size).to(kind) for _ in range(2))
    weight, bias = (torch.randn(size[1]).to(kind) for _ in range(2))
    run = next(b for b in FAMILY.candidates("forward") if b.name == backend).load()
    if not grad:
        return lambda: run(x, weight, bias, activation, None, None)

    def both() -> object:
        y = run(x, weight, bias, activation, None, None)
        return y, cpp.backward(dy, x, weight, bias, activation, (True, True, True))

    return both


@lru_cache(maxsize=8)
def _kernel_us(device: str) -> float:
    where = torch.device(device)
    if where.type == "cpu":
        return 0.0
    x = torch.zeros(1, device=where)

    def row() -> None:
        for _ in range(20):
            x.add_(1.0)

    return _timed_us(row, where) / 20


# --------------------------------------------------------------------------------------------
# The host


@lru_cache(maxsize=64)
def _host_us(
    device: str,
    dtype: str,
    activation: str,
    grad: bool,
    backend: str,
    touched: tuple[int, ...],
    size: tuple[int, int],
    state: str,
) -> Mapping[str, float]:
    """A call of each contender on so few rows and features, on the wall clock; on a CPU after a
    pass over as many bytes as it has ``touched``, without that pass."""
    given = device, dtype, activation, grad, backend, size
    arms = {name: _small_call(name, *given) for name in (LINEAR, OURS)}
    for name, count in zip((LINEAR, OURS), touched, strict=False):
        if count:
            arms[f"pass {name}"], arms[name] = _after_pass(arms[name], count)
    with torch.set_grad_enabled(grad):
        samples = interleave(arms, device=device, metric="wall", rounds=_ROUNDS)
    if device.startswith("cuda"):  # rows of such calls are as disturbed as this
        return {name: s.median_us for name, s in samples.items()}
    us = {name: _quiet_us(s) for name, s in samples.items()}
    return {name: us[name] - us.get(f"pass {name}", 0.0) for name in (LINEAR, OURS)}


def _after_pass(call: Callable[[], Any], size: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A pass over so many bytes, and the call behind it."""
    others = torch.ones(size // 4)

    def both() -> Any:
        others.mul_(1.0)
        return call()

    return lambda: others.mul_(1.0), both


@lru_cache(maxsize=64)
def _call_us(
    device: str,
    dtype: str,
    activation: str,
    grad: bool,
    backend: str,
    size: tuple[int, int],
    sets: int,
) -> float:
    """A call of fastlinear's on so many rows and features, on the device: so many sets of them take
    turns, by turns with what else fills its caches."""
    where = torch.device(device)
    others = torch.ones(device_facts(where).l2_bytes // 2, device=where)  # twice as many bytes
    given = device, dtype, activation, grad, backend, size
    calls = [_small_call(OURS, *given) for _ in range(sets)]
    turn = [0]

    def rotating() -> Any:
        turn[0] = (turn[0] + 1) % sets
        return calls[turn[0]]()

    arms: dict[str, Callable[[], Any]] = {OURS: rotating, "other": lambda: others.mul_(1.0)}
    with torch.set_grad_enabled(grad):
        samples = interleave(arms, device=device, metric="device", rounds=_ROUNDS)
    return _quiet_us(samples[OURS])


def _small_call(
    name: str,
    device: str,
    dtype: str,
    activation: str,
    grad: bool,
    backend: str,
    size: tuple[int, int] = (1, 16),
) -> Callable[[], Any]:
    """A contender on rows and features, with what is made at first calls behind it."""
    where, kind = torch.device(device), FLOAT_DTYPES[dtype]
    k = size[1]
    weights = {LINEAR: (k, k), OURS: (k,)}
    x, dy, weight, bias = (
        torch.randn(s, device=where).to(kind) for s in (size, size, weights[name], (k,))
    )
    x, weight, bias = (t.requires_grad_(grad) for t in (x, weight, bias))
    value = activation_of(activation).value
    sets = [SimpleNamespace(x=x, dy=dy, weight=weight, bias=bias)]

    def forward(s: SimpleNamespace) -> Tensor:
        if name == LINEAR:
            return value(F.linear(s.x, s.weight, s.bias))
        return diagonal_linear(s.x, s.weight, s.bias, activation=activation, backend=backend)

    def unit(i: int) -> tuple[Tensor, ...]:  # as a case's
        s = sets[i]
        y = forward(s)
        return (y, *torch.autograd.grad(y, (s.x, s.weight, s.bias), s.dy)) if grad else (y,)

    def run() -> tuple[Tensor, ...]:
        return unit(0)

    with torch.set_grad_enabled(grad):
        for _ in range(3):
            run()
        lookup.settle()
    return run


def _timed_us(run: Callable[[], Any], where: torch.device) -> float:
    with torch.no_grad():
        samples = interleave({"it": run}, device=where, metric="device", rounds=_ROUNDS)
    return _quiet_us(samples["it"])


def _quiet_us(samples: Samples) -> float:
    """The second fastest round: a model is of a machine that nothing else disturbs."""
    return sorted(samples.us)[1]
