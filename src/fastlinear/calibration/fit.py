"""Fits prices of work to measured calls.

A call's time is a sum over its works, each exp of a sum of coefficients. Their logarithms are
fitted by the method of Levenberg and Marquardt, with Huber's loss. Coefficients are drawn towards
those of prices known before (none: a rate that is the same for all sizes), curves towards smooth
ones: where nothing was measured, what was known holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fastlinear.dispatch.prices import KNOTS, Price, Prices, name_of, place
from fastlinear.dispatch.work import CALL, HOST, Work

_HUBER = 0.15
_ITERATIONS = 40
VARIED = {True: frozenset({"m", "k", "n"}), False: frozenset({"numbers"})}
"""Whether a kind is a product → the sizes by which a variant differs from its kind."""
_Key = tuple[str, str, str, int]  # name, "level" | "curve" | "flag", which, knot


@dataclass(frozen=True)
class Pull:
    """How strongly coefficients are drawn towards what is known or plain.

    Attributes:
        level, curve, flag: towards nothing, where no prices were known before.
        known: of each coefficient towards that of prices known before.
        step, bend: of curves towards level ones, and straight ones.
        call, other: log microseconds of a call and of a unit of other work that nobody has a price
            for.
    """

    level: float
    curve: float
    flag: float
    known: float
    step: float
    bend: float
    call: float
    other: float


NUMBERS = Pull(0.01, 0.02, 0.06, 1.0, 0.045, 0.15, 0.5, -7.0)
"""Where units are numbers and multiplications (CPUs)."""
MICROSECONDS = Pull(0.03, 0.02, 0.24, 3.0, 0.72, 1.2, 0.5, 0.0)
"""Where they are microseconds of an ideal device (GPUs): curves are corrections."""


@dataclass(frozen=True)
class Call:
    """A measured call: its works, its dtype and its microseconds."""

    works: tuple[Work, ...]
    dtype: str
    us: float


def fit(
    calls: Sequence[Call],
    device: str,
    before: Prices | None = None,
    free: Callable[[str], bool] = lambda _: True,
    pull: Pull = NUMBERS,
) -> Prices:
    """Prices by which the calls take what was measured.

    Args:
        calls: at least one.
        device: the slug of the device they were measured on.
        before: prices known before, of this device or ``moved`` to it. Kinds of work that no call
            has keep theirs.
        free: kind of work → whether its price is sought; else it is known before.
        pull: what holds where calls say little.
    """
    found = dict(before.by_kind) if before is not None else {}
    for some in _independent(calls, free):
        problem = _Problem(some, before, free, pull)
        for name, price in problem.prices(problem.solve()).items():
            known = found.get(name)
            if known is not None:
                curves, flags = {**known.curves, **price.curves}, {**known.flags, **price.flags}
                price = Price(price.level, curves, flags)
            found[name] = price
    return Prices(device, found)


def moved(before: Prices, calls: Sequence[Call], pull: Pull = NUMBERS) -> Prices:
    """Prices of another device, all of a sort of work and a dtype times the same: a device is
    faster or slower as a whole. Calls that have a work without a price tell nothing."""
    told: list[Call] = []
    ones: dict[str, Price] = {}
    for one in calls:
        each = [(w, before.predict((w,), one.dtype)) for w in one.works]
        works = tuple(
            Work(_sort(w.kind), p.us, dtype=w.dtype) for w, p in each if p is not None and p.us > 0
        )
        if works and all(p is not None for _, p in each):
            told.append(Call(works, one.dtype, one.us))
            ones |= {name_of(w.kind, w.dtype or one.dtype): Price(0.0) for w in works}
    if not told:
        return before
    times = fit(told, before.device, Prices(before.device, ones), pull=pull).by_kind

    def priced(name: str, price: Price) -> Price:
        dtype, _, kind = name.partition(" ")
        by = times.get(name_of(_sort(kind), dtype))
        return price if by is None or "/" in name else replace(price, level=price.level + by.level)

    return replace(before, by_kind={name: priced(name, p) for name, p in before.by_kind.items()})


def _sort(kind: str) -> str:
    """Of a kind of work: ``"product"``, ``"host"``, ``"call"``, or ``"pass"`` for all others; of
    calls from Python alone apart."""
    first, last = kind.partition(" ")[0], kind.rpartition(" ")[2]
    sort = last if last in ("product", HOST.strip(), CALL.strip()) else "pass"
    return f"alone {sort}" if first == "alone" else sort


def _independent(calls: Sequence[Call], free: Callable[[str], bool]) -> list[list[Call]]:
    """The calls in parts that have no sought price in common."""
    leader: dict[tuple[str, str], tuple[str, str]] = {}

    def lead(key: tuple[str, str]) -> tuple[str, str]:
        while leader.setdefault(key, key) != key:
            leader[key] = leader[leader[key]]
            key = leader[key]
        return key

    parts: dict[tuple[str, str], list[Call]] = {}
    keys = [[(w.dtype or one.dtype, w.kind) for w in one.works if free(w.kind)] for one in calls]
    for own in keys:
        for other in own[1:]:
            leader[lead(other)] = lead(own[0])
    for one, own in zip(calls, keys, strict=True):
        if own:
            parts.setdefault(lead(own[0]), []).append(one)
    return list(parts.values())


class _Block(NamedTuple):
    """Calls with works of the same kinds, the coefficients that these have, which entries of the
    sparse rows they are, and where each lies in a dense matrix of both."""

    calls: np.ndarray
    columns: np.ndarray
    entries: np.ndarray
    places: np.ndarray


class _Problem:
    """The least squares: works as sparse rows over coefficients."""

    def __init__(
        self,
        calls: Sequence[Call],
        before: Prices | None,
        free: Callable[[str], bool],
        pull: Pull,
    ) -> None:
        self.columns: dict[_Key, int] = {}
        self.prior: list[float] = []
        self._before, self._pull = before, pull
        call_of: list[int] = []
        offset: list[float] = []
        work_of: list[int] = []
        column: list[int] = []
        value: list[float] = []
        for i, one in enumerate(calls):
            for work in one.works:
                at = len(call_of)
                call_of.append(i)
                if not free(work.kind):
                    told = None if before is None else before.predict((work,), one.dtype)
                    offset.append(math.log(max(1e-9 if told is None else told.us, 1e-9)))
                    continue
                offset.append(math.log(max(work.units, 1e-9)))
                for c, v in self._basis(work, one.dtype):
                    work_of.append(at)
                    column.append(c)
                    value.append(v)
        self.call_of, self.offset = np.array(call_of), np.array(offset)
        self.work_of, self.column = np.array(work_of, dtype=np.intp), np.array(column)
        self.value = np.array(value)
        self.target = np.log([one.us for one in calls])
        self.count = len(calls)
        self.blocks = self._blocks([frozenset(w.kind for w in one.works) for one in calls])
        self.pull, self.towards = self._penalties()

    def _blocks(self, kinds: Sequence[frozenset[str]]) -> list[_Block]:
        """The calls by the kinds of work they have: few coefficients matter to each block."""
        numbers = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
        block_of = np.array([numbers[kind] for kind in kinds])
        entry_of = block_of[self.call_of[self.work_of]]
        order = np.argsort(entry_of, kind="stable")
        ends = np.searchsorted(entry_of[order], np.arange(len(numbers) + 1))
        found = []
        for i, (begin, end) in enumerate(pairwise(ends)):
            entries, calls = order[begin:end], np.flatnonzero(block_of == i)
            columns, local = np.unique(self.column[entries], return_inverse=True)
            row = np.searchsorted(calls, self.call_of[self.work_of[entries]])
            found.append(_Block(calls, columns, entries, row * len(columns) + local))
        return found

    def _basis(self, work: Work, dtype: str) -> Iterable[tuple[int, float]]:
        dtype = work.dtype or dtype
        names = [name_of(work.kind, dtype)]
        names += [name_of(work.kind, dtype, variant) for variant in work.variants]
        for name in names:
            is_call = work.kind.endswith((HOST, CALL)) or name != names[0]
            yield self._column((name, "level", "", 0), is_call, varied=name != names[0]), 1.0
            varied = name != names[0]
            for size, number in (work.sizes or {}).items():
                if varied and size not in VARIED[work.kind.endswith(" product")]:
                    continue
                low, far = place(number)
                if far < 1.0:
                    yield self._column((name, "curve", size, low)), 1.0 - far
                if far > 0.0:
                    yield self._column((name, "curve", size, low + 1)), far
            if not varied:
                for flag in work.flags:
                    yield self._column((name, "flag", flag, 0)), 1.0

    def _column(self, key: _Key, is_call: bool = False, varied: bool = False) -> int:
        found = self.columns.get(key)
        if found is None:
            found = self.columns[key] = len(self.columns)
            self.prior.append(self._known(key, is_call, varied))
        return found

    def _known(self, key: _Key, is_call: bool, varied: bool) -> float:
        name, what, which, knot = key
        price = None if self._before is None else self._before.by_kind.get(name)
        if price is None:
            if what != "level" or varied:
                return 0.0
            return self._pull.call if is_call else self._pull.other
        if what == "level":
            return price.level
        if what == "flag":
            return price.flags.get(which, 0.0)
        return price.curves[which][knot] if which in price.curves else 0.0

    def _penalties(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows r and numbers b of the penalty |r θ - b|²."""
        count, hold = len(self.columns), self._pull
        prior = np.array(self.prior)
        rows = []
        curves: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for (name, what, which, knot), column in self.columns.items():
            row = np.zeros(count)
            varied = what == "level" and "/" in name
            was = self._before is not None and name in self._before.by_kind
            row[column] = hold.known if was else getattr(hold, "flag" if varied else what)
            rows.append(row)
            if what == "curve":
                curves.setdefault((name, which), []).append((knot, column))
        for members in curves.values():
            members.sort()
            for (low, a), (high, b) in pairwise(members):
                row = np.zeros(count)
                row[[a, b]] = -hold.step / (high - low), hold.step / (high - low)
                rows.append(row)
            for (low, a), (_, b), (high, c) in zip(members, members[1:], members[2:], strict=False):
                row = np.zeros(count)
                row[[a, b, c]] = np.array([1.0, -2.0, 1.0]) * 2 * hold.bend / (high - low)
                rows.append(row)
        pull = np.array(rows)
        return pull, pull @ prior

    def solve(self) -> np.ndarray:
        theta, damping = np.array(self.prior), 1.0
        normal, wanted = self.pull.T @ self.pull, self.pull.T @ self.towards
        loss = self._loss(theta)
        for _ in range(_ITERATIONS):
            a, g = normal.copy(), wanted - normal @ theta
            self._add_data(theta, a, g)
            while True:
                step = np.linalg.solve(a + damping * np.diag(np.diag(a) + 1e-6), g)
                now = self._loss(theta + step)
                if now < loss or damping > 1e8:
                    break
                damping *= 4
            if now >= loss:
                break
            theta, gained, loss = theta + step, loss - now, now
            damping = max(damping / 5, 1e-6)
            if gained < 1e-4 * loss:
                break
        return theta

    def _times(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The microseconds of each work, and of each call."""
        logs = self.offset + np.bincount(
            self.work_of, self.value * theta[self.column], len(self.offset)
        )
        each = np.exp(np.minimum(logs, 40.0))
        return each, np.bincount(self.call_of, each, self.count)

    def _add_data(self, theta: np.ndarray, a: np.ndarray, g: np.ndarray) -> None:
        """Add the calls' part to the normal equations ``a`` and ``g``."""
        each, total = self._times(theta)
        share = (each / total[self.call_of])[self.work_of] * self.value
        residual = self.target - np.log(total)
        weight = np.minimum(1.0, _HUBER / np.maximum(np.abs(residual), 1e-9))
        for calls, columns, entries, places in self.blocks:
            shape = len(calls), len(columns)
            slopes = np.bincount(places, share[entries], math.prod(shape)).reshape(shape)
            weighted = slopes * weight[calls, None]
            a[np.ix_(columns, columns)] += weighted.T @ slopes
            g[columns] += weighted.T @ residual[calls]

    def _loss(self, theta: np.ndarray) -> float:
        off = np.abs(self.target - np.log(self._times(theta)[1]))
        data = np.where(off < _HUBER, off * off, 2 * _HUBER * off - _HUBER * _HUBER).sum()
        return float(data + ((self.pull @ theta - self.towards) ** 2).sum())

    def prices(self, theta: np.ndarray) -> dict[str, Price]:
        """Coefficients as prices. Between and beyond the knots that calls touched, a curve is off
        from what was known as much as at the nearest ones."""
        levels: dict[str, float] = {}
        curves: dict[str, dict[str, dict[int, float]]] = {}
        flags: dict[str, dict[str, float]] = {}
        off = theta - np.array(self.prior)
        for (name, what, which, knot), column in self.columns.items():
            if what == "level":
                levels[name] = float(theta[column])
            elif what == "flag":
                flags.setdefault(name, {})[which] = float(theta[column])
            else:
                curves.setdefault(name, {}).setdefault(which, {})[knot] = float(off[column])
        every = range(len(KNOTS))
        return {
            name: Price(
                level,
                {
                    size: tuple(
                        self._known((name, "curve", size, knot), False, False)
                        + float(np.interp(knot, sorted(offs), [offs[k] for k in sorted(offs)]))
                        for knot in every
                    )
                    for size, offs in curves.get(name, {}).items()
                },
                flags.get(name, {}),
            )
            for name, level in levels.items()
        }
