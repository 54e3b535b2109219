"""The CUDA C++ of unequal_linear run on a CPU, thread by thread: launches, tiles, masks, sums.

What cannot be seen so is whether the instructions do what ``emulated.h`` says they do.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.core.compare import judge
from fastlinear.core.problem import Problem
from fastlinear.dispatch.roofline import units
from fastlinear.families.grouped.gpu_work import work
from fastlinear.families.grouped.problem import STEP
from fastlinear.families.grouped.unequal import autograd, spec
from fastlinear.families.grouped.unequal.cuda import backend, compiled, launches
from fastlinear.families.grouped.unequal.cuda.config import (
    FORWARD,
    GRAD_INPUT,
    GRAD_WEIGHT,
    MIDDLE,
    OFFERED,
    PLAIN,
    SINGLE,
    SINGLES,
    SMALL,
    Choice,
    SingleTiles,
    Tiles,
    choice_of,
    largest_first,
    single_choice_of,
    single_time,
)
from fastlinear.families.grouped.unequal.cuda.launches import Kind
from fastlinear.families.grouped.unequal.problem import problem
from fastlinear.fastpath import autograd_node, lookup
from fastlinear.native import cuda_driver as driver

if not shutil.which("g++"):
    pytest.skip("needs a C++ compiler", allow_module_level=True)

# (tokens, K, N): rows at 16 bytes, at 4, at 2; less than a tile, and more; no tokens; no features
SIZES = (
    *((70, 72, 80), (3, 10, 66), (65, 33, 7), (130, 130, 8), (5, 200, 16), (0, 8, 9)),
    *((1, 1, 1), (64, 64, 64), (67, 8, 136), (6, 0, 0), (3, 0, 70)),
)
_MAIN = """
const Groups* given;
int group_count;
void body() {
  unequal_linear(*given, group_count);
  fibers[current].done = true;
}
extern "C" void launch(const void* groups, int count, int blocks) {
  given = static_cast<const Groups*>(groups);
  group_count = count;
  run_blocks(blocks, body);
}
"""


class Emulated:
    """``cuda_driver.Launch`` of a kernel compiled for the CPU; ``DRIVER`` runs it by its handle."""

    def __init__(self, kernel: Any, threads: int, cluster: int, arguments: Any) -> None:
        self._kernel, self._arguments = kernel, arguments
        self._blocks = 0
        self._config = driver._LaunchConfig()
        self._config_ref = ctypes.addressof(self._config)
        self._slots = (ctypes.c_void_p * 2)(*map(ctypes.addressof, arguments))
        LAUNCHES.append(self)
        self._handle = len(LAUNCHES)

    def begin_early(self) -> None:
        EARLY.append(self)

    def set_grid(self, blocks: int) -> None:
        self._blocks = blocks

    def run(self, stream: int) -> None:
        self.run_on(ctypes.addressof(self._slots))

    def run_on(self, slots: int) -> None:
        """Run on the arguments that lie at these addresses."""
        memory, count = (ctypes.c_void_p * 2).from_address(slots)
        assert memory is not None
        assert count is not None
        number = ctypes.c_int.from_address(count).value
        self._kernel.launch(ctypes.c_void_p(memory), number, self._blocks)


_FOLDER = tempfile.TemporaryDirectory(prefix="emulated")
LAUNCHES: list[Emulated] = []
EARLY: list[Emulated] = []
CHOICE: list[Choice] = []


@ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
def DRIVER(_config: int, handle: int, slots: int, _: int) -> int:
    LAUNCHES[handle - 1].run_on(slots)
    return 0


@cache
def _built(source: str) -> ctypes.CDLL:
    path = Path(_FOLDER.name) / f"{hashlib.sha256(source.encode()).hexdigest()}.cpp"
    path.write_text(source)
    built = path.with_suffix(".so")
    command = ["g++", "-O1", "-std=c++17", "-w", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", built, path], check=True)
    return ctypes.CDLL(str(built))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches run on the CPU; new memory is NaN."""
    kernels: dict[Any, Any] = {}
    empty = torch.empty
    here = str(Path(__file__).with_name("emulated.h"))

    def loaded(kind: Kind, places: int, device: int | None) -> Any:
        pitched, extras = kind.pitches is not None, kind.extras()
        key = kind.call, kind.dtype, kind.choice.tiles, places, pitched, extras
        if key not in kernels:
            headers = (here, *compiled._HEADERS[1:])
            rest = (*kind.call, kind.choice.tiles, places, pitched, extras)
            kernels[key] = _built(compiled.source(kind.dtype, *rest, headers=headers) + _MAIN)
        return kernels[key]

    def choice(_sizes: Any, mode: int, *given: Any) -> Choice:
        chosen = CHOICE[-1]
        if given[2] is torch.float32 and not isinstance(chosen.tiles, SingleTiles):
            chosen = Choice(SINGLE, chosen.steps)
        elif mode != GRAD_WEIGHT and not isinstance(chosen.tiles, SingleTiles):
            chosen = Choice(chosen.tiles)
        return chosen

    def unknown(*given: Any, **named: Any) -> Tensor:
        return empty(*given, **named).fill_(float("nan"))

    CHOICE[:] = [Choice(SMALL)]
    launches.kept_parts.cache_clear()
    for name in ("Launch", "make_current"):
        monkeypatch.setattr(launches.driver, name, Emulated if name == "Launch" else lambda _: None)
    monkeypatch.setattr(autograd, "kernels", lambda _: backend)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(torch, "empty", unknown)
    monkeypatch.setattr(launches, "_loaded", loaded)
    monkeypatch.setattr(backend, "_choice", choice)
    yield
    launches.kept_parts.cache_clear()
    LAUNCHES.clear()
    EARLY.clear()


def drawn(dtype: torch.dtype, sizes: Any) -> tuple[list[Tensor], list[Tensor], list[Any]]:
    generator = torch.Generator().manual_seed(1)

    def values(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        return made.to(dtype).requires_grad_()

    xs, weights = [values(m, k) for m, k, _ in sizes], [values(n, k) for _, k, n in sizes]
    return xs, weights, [values(n) if i % 3 else None for i, (_, _, n) in enumerate(sizes)]


def by_loop(dtype: torch.dtype, lists: Any, activation: str, dys: list[Tensor]) -> list[Any]:
    own = [
        [None if t is None else t.detach().to(dtype).requires_grad_() for t in ts] for ts in lists
    ]
    ys = autograd.loop(*own, activation)  # type: ignore[arg-type]
    given = [t for ts in own for t in ts if t is not None]
    found = list(torch.autograd.grad(ys, given, [dy.to(dtype) for dy in dys]))
    count = len(ys)
    return [ys, found[:count], found[count : 2 * count], found[2 * count :]]


def check(dtype: torch.dtype, activation: str, sizes: Any = SIZES) -> None:
    lists = drawn(dtype, sizes)
    dys = [torch.randn(m, n).to(dtype) for m, _, n in sizes]
    ys = autograd.applied(autograd.Formula(activation), *lists)
    given = [t for ts in lists for t in ts if t is not None]
    grads = torch.autograd.grad(ys, given, dys)
    count = len(sizes)
    found = [ys, grads[:count], grads[count : 2 * count], grads[2 * count :]]
    theirs = by_loop(dtype, lists, activation, dys)
    oracle = by_loop(torch.float64, lists, activation, dys)
    for name, *kinds in zip(("y", "dx", "dW", "db"), found, theirs, oracle, strict=True):
        a, t, o = (torch.cat([r.flatten() for r in ts]) for ts in kinds)
        verdict = judge(name, a, t, o)
        assert verdict.passed, str(verdict)
    empty = [g for g, (m, _, _) in enumerate(sizes) if not m]
    assert not any(found[2][g].any() for g in empty)


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("tiles", OFFERED[0] + OFFERED[2][2:], ids=lambda t: f"{t.rows}x{t.cols}")
def test_tiles(tiles: Tiles, activation: str, emulated: None) -> None:
    CHOICE[:] = [Choice(tiles, 1)]
    check(torch.bfloat16, activation)


@pytest.mark.parametrize(
    ("dtype", "activation"), [(torch.float16, "relu"), (torch.float32, "silu")], ids=str
)
def test_dtypes(dtype: torch.dtype, activation: str, emulated: None) -> None:
    check(dtype, activation)


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("tiles", SINGLES, ids=lambda t: f"{t.rows}x{t.cols}")
@pytest.mark.parametrize("steps", [None, 1])
def test_float32_tiles(
    steps: int | None, tiles: SingleTiles, activation: str, emulated: None
) -> None:
    """The depth of every product whole, and divided among blocks."""
    CHOICE[:] = [Choice(tiles, steps)]
    check(torch.float32, activation)
    assert any(launch._blocks for launch in LAUNCHES)


PARTS = ((300, 24, 10), (129, 9, 7), (64, 8, 8), (0, 5, 6), (200, 0, 3), (65, 130, 72), (5, 8, 0))


def gradients(dtype: torch.dtype, activation: str, wanted: str) -> list[Tensor | None]:
    """Of the inputs, weights and biases whose letters are in ``wanted``."""
    formula = autograd.Formula(activation)
    torch.manual_seed(2)
    xs, weights, _ = drawn(dtype, PARTS)
    biases = [torch.randn(n).to(dtype) for *_, n in PARTS]
    with torch.no_grad():
        ys, pre = formula.forward(xs, weights, biases)
        kept = [pre] if formula.keeps == "pre" else ys
        dys = [torch.randn_like(y) for y in ys]
        needs = [letter in wanted for letter in "xwb" for _ in PARTS]
        return list(formula.gradients(dys, [*xs, *weights, *biases], kept, needs))  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("dtype", "activation"), [(torch.bfloat16, "relu"), (torch.float32, "none")], ids=str
)
def test_parts_of_the_rows(
    activation: str, dtype: torch.dtype, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows divided among blocks: the oracle's numbers whatever is wanted, the same every time, and
    bit for bit the same in several launches."""
    CHOICE[:] = [Choice(SMALL, 2)]
    check(dtype, activation, PARTS)
    CHOICE[:] = [Choice(SMALL, 1)]
    check(dtype, activation, PARTS)
    everything = gradients(dtype, activation, "xwb")
    count = len(PARTS)
    monkeypatch.setattr(launches, "MAX_GROUPS", 3)
    launches.kept_parts.cache_clear()
    for wanted in ("xwb", "x", "w", "b", "xb"):
        launched = len(LAUNCHES)
        found = gradients(dtype, activation, wanted)
        for i, (one, other) in enumerate(zip(found, everything, strict=True)):
            assert (one is None) == ("xwb"[i // count] not in wanted)
            assert one is None or (other is not None and torch.equal(one, other))
        # of the forward, of six groups with dW and four with shares, of five with dx; float32 adds
        # shares of y and of dx up
        assert len(LAUNCHES) - launched <= 2 + 2 + 2 + (2 if dtype is torch.float32 else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_the_pre_activations_once_or_twice(
    dtype: torch.dtype, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read where the launch of dW has left them, or derived anew, and where the launch of dx begins
    early: bit for bit the same."""
    for activation in ("relu", "gelu"):
        found = []
        for once, early in ((True, False), (False, False), (True, True), (False, True)):
            with monkeypatch.context() as patched:
                forced = partial(backend.backward, choices=backend.Choices(once=once))
                patched.setattr(backend, "backward", forced)
                patched.setattr(backend, "_early", lambda *_, early=early: early)
                found.append(gradients(dtype, activation, "xwb"))
        for other in found[1:]:
            for a, b in zip(found[0], other, strict=True):
                assert a is not None
                assert b is not None
                assert torch.equal(a, b)
    assert len(EARLY) == 3  # dx of what is read, and of each activation, prepared once


def test_views_that_begin_anywhere(emulated: None) -> None:
    """Rows of 64 numbers in memory that begins at 2 and at 4 bytes."""
    for skipped in (1, 2):
        x = torch.randn(skipped + 20 * 64).bfloat16()[skipped:].view(20, 64)
        weight, dy = torch.randn(32, 64).bfloat16(), torch.randn(20, 32).bfloat16()
        plain = autograd.Formula("none")
        (y,), _ = plain.forward([x], [weight], None)
        torch.testing.assert_close(y, x @ weight.t())
        with torch.no_grad():
            _, dw, _ = plain.gradients([dy], [x, weight, None], [], [False, True, False])
        torch.testing.assert_close(dw, dy.t() @ x)
        weight, pre = torch.randn(64, 48).bfloat16(), torch.randn(20, 64).bfloat16()
        call = [torch.empty(20, 48).bfloat16(), weight, None]
        needs = [True, False, False]
        with torch.no_grad():  # x as dy
            dx, _, _ = autograd.Formula("gelu").gradients([x], call, [pre.flatten()], needs)
        (slope,) = torch.autograd.grad(
            torch.nn.functional.gelu(pre.requires_grad_()), pre, torch.ones_like(pre)
        )
        expected = (x.float() * slope.float()) @ weight.float()
        torch.testing.assert_close(dx.float(), expected, rtol=0.02, atol=0.2)


@pytest.mark.parametrize(
    ("dtype", "activation"), [(torch.bfloat16, "gelu"), (torch.float32, "relu")], ids=str
)
def test_pieces_of_one_tensor(activation: str, dtype: torch.dtype, emulated: None) -> None:
    """Rows beside those of other groups, that begin at 16, 4 and 2 bytes, bit for bit as dense
    ones: what lies behind a row is no part of it."""
    sizes = ((70, 72, 80), (70, 10, 66), (70, 33, 7), (70, 64, 64), (70, 1, 8), (70, 130, 16))
    formula = autograd.Formula(activation)
    if dtype is torch.float32:
        CHOICE[:] = [Choice(SINGLES[activation == "relu"], 1)]
    for kept in (sizes, [sizes[i] for i in (0, 3, 0)]):  # multiples of 8 only
        _, weights, biases = drawn(dtype, kept)
        for t in (*weights, *biases):
            if t is not None:
                t.requires_grad_(False)
        x, dy = (torch.randn(70, sum(size[i] for size in kept)).to(dtype) for i in (1, 2))
        xs, dys = (t.split([s[i] for s in kept], 1) for t, i in ((x, 1), (dy, 2)))

        def found(change: Any, of_x: Any, of_dy: Any, w: Any = weights, b: Any = biases) -> Any:
            ys, pre = formula.forward(of_x, w, b)
            held = [pre] if formula.keeps == "pre" else ys
            with torch.no_grad():
                grads = formula.gradients(of_dy, [*of_x, *w, *b], held, [True] * 3 * len(ys))
            assert all(change(t) is t for t in (*of_x, *of_dy)), "none was copied"
            return [*ys, *(t for t in grads if t is not None)]

        dense = found(autograd.dense, *([t.contiguous() for t in ts] for ts in (xs, dys)))
        beside_nan = ([_beside_nan(t) for t in ts] for ts in (xs, dys))
        for a, b, e in zip(
            found(autograd.lined, xs, dys), found(autograd.lined, *beside_nan), dense, strict=True
        ):
            assert torch.equal(a, e)
            assert torch.equal(b, e)


def _beside_nan(t: Tensor) -> Tensor:
    """t in rows that begin at 16 bytes, with NaN between them."""
    rows, features = t.shape
    wide = torch.full((rows, features // 8 * 8 + 16), float("nan"), dtype=t.dtype)
    wide[:, :features] = t
    return wide[:, :features]


@pytest.fixture
def _driver() -> Iterator[None]:
    """The fast path's nodes launch emulated kernels."""
    if torch.cuda.is_available() or autograd_node.reason_not() is not None:
        pytest.skip("needs the fast path's library, without the driver itself")
    assert lookup.wait()
    assert autograd_node.wait()
    library = autograd_node._build.loaded
    assert library is not None
    pointer = ctypes.cast(DRIVER, ctypes.c_void_p)
    library.fastlinear_node_cuda(None, pointer, pointer)
    yield
    library.fastlinear_node_cuda(None, None, None)


@pytest.mark.usefixtures("_driver", "emulated")
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_tapes(activation: str) -> None:
    """Through the fast path the same kernels compute on the same memory: bit for bit."""
    table = lookup.table("unequal_linear.test")
    assert table is not None
    small = ((min(m, 5), min(k, 40), min(n, 40)) for m, k, n in SIZES)
    sizes = (*small, (130, 9, 10), (3, 70, 66))
    CHOICE[:] = [Choice(SMALL, 1)]
    for dtype in (torch.bfloat16, torch.float32):
        adds = int(dtype is torch.float32)  # launches behind y and behind dx
        xs, weights, biases = drawn(dtype, sizes)
        xs[0] = xs[0].detach().t().contiguous().t().requires_grad_()
        xs[1] = xs[1].detach().view(3, 1, -1).requires_grad_()
        xs[2].requires_grad_(False)
        xs[3] = torch.cat([xs[3].detach()] * 2, 1)[:, : xs[3].shape[1]].requires_grad_()
        for given in ((xs, weights, biases), (xs, weights, None)):
            table.clear()
            formula = autograd.Formula(activation)
            wanted = [t for ts in given for t in ts or () if t is not None and t.requires_grad]
            expected = autograd.applied(formula, *given)
            dys = [torch.randn_like(y) for y in expected]
            grads = torch.autograd.grad(expected, wanted, dys)
            assert table.admit(*given, "a", spec._record(formula, True, *given))
            launched = len(LAUNCHES)
            ys = table.call(*given, "a")
            assert ys[0].grad_fn.name() == "UnequalLinearBackward"
            for _ in range(3):
                found = torch.autograd.grad(ys, wanted, dys, retain_graph=True)
                for a, e in zip((*ys, *found), (*expected, *grads), strict=True):
                    assert a.shape == e.shape
                    assert torch.equal(a, e)
            # prepared for the backward's tape, once
            assert len(LAUNCHES) == launched + 2 + adds
            apart = [_beside_nan(dy) if dy.dim() == 2 else dy for dy in dys]
            for _ in range(3):
                found = torch.autograd.grad(ys, wanted, apart, retain_graph=True)
                for a, e in zip(found, grads, strict=True):
                    assert torch.equal(a, e)
            # both of another tape, and what Python did not have yet
            assert launched + 2 * (2 + adds) < len(LAUNCHES) <= launched + 3 * (2 + adds)
            with torch.no_grad():
                assert table.admit(*given, "a", spec._record(formula, False, *given))
                for a, e in zip(table.call(*given, "a"), expected, strict=True):
                    assert torch.equal(a, e)
    table.clear()


def test_float32_choice() -> None:
    """Low tiles for few rows, and the depth divided where tiles leave multiprocessors idle."""
    for mode in (FORWARD, GRAD_INPUT, GRAD_WEIGHT):
        for derived in (False, True):
            choice = partial(single_choice_of, units=132, mode=mode, derived=derived)
            assert choice(((1, 4096, 4096),) * 10).tiles == SINGLES[0]
            assert choice(((2048, 512, 512),) * 26).tiles == SINGLE
            assert choice(((64, 64, 4096),)).parts(4096) >= 16
            assert choice(((1, 16, 4096),)).parts(4096) >= 4
            assert choice(((1, 16, 64),)).parts(64) == 1
            assert choice(()).steps is None
    for sizes in (((1, 448, 896),) * 26, ((400, 64, 1984), (300, 32, 70)), ((3, 5000, 900),)):
        best = single_choice_of(sizes, 132, FORWARD)
        times = [single_time(c, sizes, 132, FORWARD) for c in (best, Choice(SINGLE))]
        assert times[0] < times[1] / 1.5


def test_float32_price_is_of_the_chosen_tiles() -> None:
    for piece, needs_grad in (("forward", False), (STEP, True)):
        told = [
            next(w.units for w in made if w.kind.endswith("product"))
            for rows in (10, 6400)
            if (made := work(_problem_of(piece, rows, needs_grad), "together")) is not None
        ]
        sizes = ((1, 256, 512),) * 10
        least = single_time(single_choice_of(sizes, units(), FORWARD), sizes, units(), FORWARD)
        assert told[0] == pytest.approx(least) if piece == "forward" else told[0] > 2 * least
        assert told[1] > 2 * told[0]


def _problem_of(piece: str, rows: int, needs_grad: bool) -> Problem:
    return problem(piece, rows, 10, 512, 256, dtype="float32", device="cuda", needs_grad=needs_grad)


def test_choice() -> None:
    """Large tiles where they fill the chip only; parts of the rows where tiles alone do not."""
    for mode in (FORWARD, GRAD_INPUT, GRAD_WEIGHT):
        for derived in (False, True):
            offered = PLAIN if mode == GRAD_INPUT and not derived else OFFERED[mode]
            turned = mode == GRAD_WEIGHT

            def choice(m: int, n: int, k: int, mode: int = mode, derived: bool = derived) -> Choice:
                sizes = ((n, k, m) if turned else (m, n, k),) * 26  # noqa: B023
                return choice_of(sizes, 132, mode, derived, False)

            assert choice(64, 64, 64).tiles is offered[0]
            assert choice(2048, 256, 256).tiles is offered[2]
            if not turned:
                assert choice(8192, 40, 256).tiles in (SMALL, MIDDLE)
            else:
                assert choice(64, 64, 64).steps is None
                few = ((64, 64, 4096),)
                for odd in (False, True):
                    assert choice_of(few, 132, mode, derived, odd).parts(4096) >= 16
    assert [Choice(SMALL, 3).parts(m) for m in (0, 1, 192, 193, 256, 449)] == [1, 1, 1, 2, 2, 3]
    assert Choice(SMALL).parts(10**6) == 1
    assert [Choice(SMALL, 4).parts(64 * steps) for steps in (5, 9, 13)] == [2, 3, 4]
    sizes = ((1, 2, 3), (0, 2, 9), (1, 1, 5), (1, 0, 7))
    assert largest_first(sizes, FORWARD) == [2, 0]
    assert largest_first(sizes, GRAD_WEIGHT) == [3, 2, 0]  # for db
    assert largest_first(sizes, GRAD_WEIGHT, [1, 1, 1, 7]) == [2, 0, 3]
