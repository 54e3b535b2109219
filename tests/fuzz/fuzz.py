"""Random calls of every public op and layer against float64, each case from one seed.

    python -m tests.fuzz.fuzz --seconds 600 --seed 1         new cases until time is up
    python -m tests.fuzz.fuzz --case linear_act 17           one case again

A case calls one op several times. Between calls tensors change: their numbers, memory, dtype, rows,
which gradients are wanted; and so do the mode, the backend and the threads. Every result and every
gradient is judged, the given tensors stay as they were, and none has a gradient that PyTorch has
not.

The rule of numbers holds for results of at least ``_MANY`` numbers, one by one. PyTorch's error in
fewer is luck: those are judged together, of all cases of an op and dtype (``Pool``), and each
by itself only against gross errors.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import widened
from fastlinear.core.compare import DEFAULT_FACTOR, relative_error, unit_rounding
from fastlinear.core.errors import UnsupportedError
from fastlinear.dispatch.backend import families, family
from fastlinear.families.declared import load_all
from fastlinear.fastpath import autograd_node, lookup
from tests.fuzz.fuzz_calls import ACTIVATIONS, CALLS, DTYPES, Call, Draw, Tensors

_MANY = 256
_GROSS = 64  # roundings of results with few numbers
_MODES = ("grad", "grad", "grad", "no_grad", "inference", "autocast")
Judged = tuple[
    Tensor, Tensor, Tensor
]  # ours, PyTorch's, the oracle's, finite, by the oracle's norm


class Pool:
    """Results of few numbers, by op, dtype and kind."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, torch.dtype, str], list[tuple[str, Judged]]]
        self.found = defaultdict(list)
        self.case = ""
        """The one that runs, as its failure names it."""

    def wrong(self) -> list[str]:
        """What breaks the rule of numbers, all results of a kind together but the furthest one: a
        sum that cancels decides nothing by itself."""
        told = []
        for (op, dtype, kind), found in self.found.items():
            ranked = sorted(found, key=lambda case: float((case[1][0] - case[1][2]).norm()))[:-1]
            if not ranked:
                continue
            ours, theirs, exact = map(torch.cat, zip(*(parts for _, parts in ranked), strict=True))
            error, limit = errors(ours, theirs, exact, dtype)
            if ours.numel() >= _MANY and error > limit:
                worst = f"furthest: {ranked[-1][0]}"
                told.append(f"{op} {dtype} {kind}: error {error:.3g}, limit {limit:.3g}; {worst}")
        return told


def errors(ours: Tensor, theirs: Tensor, exact: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """(our error, the limit)."""
    tiny = (16.0 if dtype is torch.float64 else 2.0) * unit_rounding(dtype)
    return relative_error(ours, exact), DEFAULT_FACTOR * relative_error(theirs, exact) + tiny


def judge(
    pool: Pool,
    op: str,
    name: str,
    results: tuple[Tensor, Tensor, Tensor],
    cast: torch.dtype | None,
) -> None:
    """Raises AssertionError where ours is further from the oracle than the rule allows.

    Args:
        results: ours, PyTorch's, the oracle's.
        cast: the dtype of autocast, whose roundings gradients of wider ones show, too.
    """
    ours, theirs, exact = results
    assert ours.shape == theirs.shape, f"{name}: shape {ours.shape}, PyTorch's {theirs.shape}"
    assert ours.dtype == theirs.dtype, f"{name}: {ours.dtype}, PyTorch's {theirs.dtype}"
    dtype = cast or theirs.dtype
    a, t, o = (v.detach().double().flatten() for v in (ours, theirs, exact))
    finite, own, truth = a.isfinite(), t.isfinite(), o.isfinite()
    lost = own & truth & ~finite
    assert not lost.any(), f"{name}: {int(lost.sum())} not finite where PyTorch's are"
    made = ~own & ~truth & finite
    assert not made.any(), f"{name}: {int(made.sum())} finite where PyTorch's are not"
    both = own & truth
    a, t, o = a[both], t[both], o[both]
    if not a.numel():
        return
    error, limit = errors(a, t, o, dtype)
    if a.numel() < _MANY:
        limit = max(limit, _GROSS * unit_rounding(dtype))
        norm = float(o.norm())
        if norm > 0 and error <= limit:
            parts = a / norm, t / norm, o / norm
            pool.found[op, dtype, "y" if name.startswith("y") else "d"].append((pool.case, parts))
    assert error <= limit, f"{name}: error {error:.3g}, limit {limit:.3g} ({a.numel()} numbers)"


load_all()


def backends(op: str) -> list[str]:
    """Names that the op's ``backend`` takes and PyTorch's own path is not."""
    listed = {
        "gated_linear": [b.name for b in family("gated_mlp").candidates("forward")],
    }
    if op in listed:
        return listed[op]
    return [b.name for b in family(op).candidates("forward")] if op in families() else []


def leaf(t: Tensor, grad: bool) -> Tensor:
    """The tensor itself where it is a parameter, else one of the same memory."""
    if isinstance(t, torch.nn.Parameter):
        return t.requires_grad_(grad)
    return t.detach().requires_grad_(grad and t.is_floating_point())


class Case:
    """One seed's calls of one op."""

    def __init__(self, op: str, seed: int) -> None:
        self.op, self.rng = op, random.Random(f"{op} {seed}")
        self.seed = self.rng.randrange(1 << 30)
        dtype = self.rng.choice(DTYPES)
        draw = Draw(self.seed, dtype, self.rng.choice(ACTIVATIONS))
        self.draw, self.dtype, self.activation = draw, dtype, draw.activation
        self.call: Call = CALLS[op](draw)
        self.wanted = {
            n: self.rng.random() < 0.8
            for n, t in self.call.tensors.items()
            if t.is_floating_point()
        }
        self.tensors = {n: leaf(t, self.wanted.get(n, False)) for n, t in self.call.tensors.items()}
        self.backend: str | None = None
        self.told = [f"{self.call.text} {self.activation} {dtype}"]

    def run(self, pool: Pool) -> None:
        """Raises AssertionError, or what a call raised that it must not raise."""
        self.dys: dict[int, int] = {}
        for step in range(self.rng.choice((2, 3, 4, 5))):
            if step and self.rng.random() < 0.6:
                self._change()
            mode = self.rng.choice(_MODES)
            if mode == "autocast" and (self.dtype is torch.float64 or widened([self.activation])):
                mode = "grad"  # what is cast there depends on the ops it is written in
            if self.rng.random() < 0.25:
                self.backend = self.rng.choice([None, *backends(self.op)])
            self.told.append(f"{mode} {self.backend or ''}".strip())
            if self.rng.random() < 0.1:
                self._by_threads(pool, mode)
            # the compiled fast path takes repeated calls
            for _ in range(self.rng.choice((1, 1, 3))):
                self._judge(pool, mode, self.tensors)

    def _change(self) -> None:
        name = self.rng.choice([n for n, t in self.tensors.items() if t.is_floating_point()])
        t, what = self.tensors[name], self.rng.choice(_CHANGES)
        self.told.append(f"{what} {name}")
        if what == "toggle":
            self.wanted[name] = not self.wanted[name]
            t.requires_grad_(self.wanted[name])
        elif what == "rows":
            self._other_rows()
        elif what == "dtype":
            self.dtype = self.draw.dtype = self.rng.choice(DTYPES)
            for n, held in self.tensors.items():
                if held.is_floating_point():
                    self._put(n, held.detach().to(self.dtype))
        elif what == "in place":
            with torch.no_grad(), contextlib.suppress(RuntimeError):  # expanded memory
                t.copy_(t.flip(0) if t.dim() else -t)
        elif what == "resize":
            kept = t.detach().clone(memory_format=torch.contiguous_format)
            self._put(name, kept.clone())
            t = self.tensors[name].requires_grad_(False)
            t.resize_(2 * kept.numel() + 1).resize_(kept.shape).copy_(kept)
            t.requires_grad_(self.wanted[name])
        elif what == "bad" and t.numel():
            held = t.detach().clone(memory_format=torch.contiguous_format)
            held.view(-1)[self.rng.randrange(held.numel())] = self.rng.choice(
                (torch.inf, -torch.inf, torch.nan)
            )
            self._put(name, held)
        else:
            self._put(name, self.draw.laid(t.detach().clone()))

    def _put(self, name: str, data: Tensor) -> None:
        """Other data in the same tensor, or, at random, in one of its own."""
        t = self.tensors[name]
        if isinstance(t, torch.nn.Parameter) or self.rng.random() < 0.5:
            t.data = data
            t.grad = None
        else:
            self.tensors[name] = leaf(data, self.wanted[name])

    def _other_rows(self) -> None:
        """Another number of rows of x, where the op reads only its last dimension."""
        x = self.tensors.get("x")
        if x is None or x.dim() != 2 or self.op in _FIXED_ROWS or "r" in self.tensors:
            return
        rows = self.rng.choice((0, 1, 4, 9, 40))
        self._put("x", self.draw.values(rows, x.shape[1]).to(self.dtype))

    def _judge(self, pool: Pool, mode: str, tensors: Tensors) -> None:
        before = {n: t.detach().clone() for n, t in tensors.items()}
        grad = mode in ("grad", "autocast")
        ours = self._results(mode, tensors)
        grads: list[Tensor | None] = []
        seed = self.rng.randrange(1 << 30)
        used = {i for i in range(len(ours)) if self.rng.random() < 0.8}
        if grad:
            grads = self._gradients(ours, tensors, seed, used)
        cast = torch.bfloat16 if mode == "autocast" else None
        plain, exact = (self._reference(before, cast, wide) for wide in (False, True))
        for i, three in enumerate(zip(ours, plain[0], exact[0], strict=True)):
            judge(pool, self.op, f"y{i}", three, cast)
        if grad:
            theirs, truth = (self._gradients(r[0], r[1], seed, used) for r in (plain, exact))
            names = [n for n in tensors if tensors[n].requires_grad]
            for name, a, t, o in zip(names, grads, theirs, truth, strict=True):
                assert (a is None) == (t is None), f"d{name}: {a}, PyTorch's {t}"
                if a is not None and t is not None and o is not None:
                    judge(pool, self.op, f"d{name}", (a, t, o), cast)
        for n, t in tensors.items():
            assert torch.equal(t.detach().nan_to_num(7), before[n].nan_to_num(7)), f"{n} written to"

    def _results(self, mode: str, tensors: Tensors) -> list[Tensor]:
        enter: dict[str, Callable[[], Any]] = {
            "no_grad": torch.no_grad,
            "inference": torch.inference_mode,
            "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        }
        with enter.get(mode, contextlib.nullcontext)():
            try:
                return self.call.ours(tensors, self.backend)
            except UnsupportedError:
                if self.backend is None:
                    raise
                self.backend = None
                return self.call.ours(tensors, None)

    def _reference(
        self, before: Mapping[str, Tensor], cast: torch.dtype | None, wide: bool
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """(results, the tensors whose gradients are theirs) by PyTorch's own ops."""
        leaves, given = {}, {}
        for n, t in before.items():
            given[n] = t
            if t.is_floating_point():
                grad = self.tensors[n].requires_grad
                leaves[n] = (t.double() if wide else t.clone()).requires_grad_(grad)
                kept = wide or cast is None or n == "r"  # a residual is added as it is
                given[n] = leaves[n] if kept else leaves[n].to(cast)
        return self.call.torchs(given), leaves

    def _gradients(
        self, ys: list[Tensor], tensors: Tensors, seed: int, used: set[int]
    ) -> list[Tensor | None]:
        wanted = [t for t in tensors.values() if t.requires_grad]
        generator = torch.Generator().manual_seed(seed)
        dys = []
        for y in ys:  # drawn in one dtype for all
            drawn = torch.randint(-3, 4, y.shape, generator=generator).double()
            dys.append(drawn.to(y.dtype))
        pairs = [(y, dy) for i, (y, dy) in enumerate(zip(ys, dys, strict=True)) if i in used]
        pairs = [(y, dy) for y, dy in pairs if y.requires_grad]
        if not pairs:
            return [None] * len(wanted)
        outputs, given = zip(*pairs, strict=True)
        return list(torch.autograd.grad(outputs, wanted, given, allow_unused=True))

    def _by_threads(self, pool: Pool, mode: str) -> None:
        """The same call from several threads at once."""
        self.told[-1] += " in threads"
        alone, failures = self._results(mode, self.tensors), list[BaseException]()

        def work() -> None:
            try:
                for _ in range(3):
                    for y, first in zip(self._results(mode, self.tensors), alone, strict=True):
                        torch.testing.assert_close(y, first, equal_nan=True)
            except BaseException as error:  # noqa: BLE001 - raised in the thread that started it
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


_FIXED_ROWS = ("ragged_linear", "grouped_linear")
_CHANGES = ("toggle", "rows", "dtype", "in place", "resize", "bad", "layout", "layout")


def run(op: str, seed: int, pool: Pool, backend: str | None = None) -> str | None:
    """What went wrong in a case, with the line that runs it again, or None.

    Args:
        op: a name in ``CALLS``.
        seed: the case's.
        pool: takes results of few numbers.
        backend: what the first call is forced to, where it can be.
    """
    case = None
    pool.case = " ".join(["--case", op, str(seed), backend or ""]).strip()
    # from here on calls of a kind always take the same path
    _ = lookup.wait() and autograd_node.wait()
    try:
        case = Case(op, seed)
        case.backend = backend
        case.run(pool)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        told = " | ".join(case.told) if case is not None else "not drawn"
        said = f"{type(error).__name__}: {str(error)[:600]}"
        return f"python -m tests.fuzz.fuzz {pool.case}\n  {told}\n  {said}"
    return None


def seeds(first: int, seconds: float) -> Iterator[int]:
    """first, first + 1, ... until time is up."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield first
        first += 1


def main() -> int:
    """Run cases of every op; 1 where any fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--case", nargs="+", metavar="OP SEED [BACKEND]")
    given = parser.parse_args()
    pool, failures, count = Pool(), [], 0
    if given.case:
        told = run(given.case[0], int(given.case[1]), pool, *given.case[2:])
        print(told or "ok")
        return int(told is not None)
    for seed in seeds(given.seed, given.seconds):
        for op in CALLS:
            told = run(op, seed, pool)
            count += 1
            if told is not None:
                failures.append(told)
                print(told, flush=True)
    wrong = pool.wrong()
    print(*wrong, f"{count} cases, {len(failures) + len(wrong)} failed", sep="\n")
    return int(bool(failures or wrong))


if __name__ == "__main__":
    sys.exit(main())
