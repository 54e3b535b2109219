"""Prices of work on a device, and what a call is predicted to take by them.

The price of a unit is exp(level + a curve of each size + flags), in microseconds: how a product's
rate grows with its sizes, for example. Curves are straight lines between ``KNOTS`` of log2 of the
size. They are fitted to measured calls (``fastlinear.calibration``): a device's shipped file, and
the user's own from ``fastlinear calibrate``, which comes first. A device without either takes those
of the shipped device that is most like it.
"""

from __future__ import annotations

import json
import math
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fastlinear.core import files
from fastlinear.core.device import (
    DeviceFacts,
    cpu_family,
    cpu_flags,
    cpu_maker,
    device_facts,
)
from fastlinear.core.errors import CacheWarning
from fastlinear.core.problem import Problem
from fastlinear.core.settings import cache_dir
from fastlinear.dispatch.work import ANY, HOST, KEPT, Work, dtype_of

FORMAT = 1
KNOTS = (*range(13), 14, 16, 18, 20, 22, 24, 26, 28, 30)
_FOLDER = Path(__file__).with_name("constants")
_MOST_BYTES = 8 << 20
_MOST_EXPONENT = 40.0
_BESIDE = 0.05
"""Of what a GPU or its host does while it waits for the other: other calls may want it."""


@dataclass(frozen=True)
class Price:
    """The price of a unit of one kind of work.

    Attributes:
        level: log of the microseconds.
        curves: size → what its knots add.
        flags: flag → what it adds.
    """

    level: float
    curves: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    flags: Mapping[str, float] = field(default_factory=dict)

    def log_us(self, work: Work) -> float:
        """Log of the microseconds of a unit."""
        found = self.level
        for name, size in (work.sizes or {}).items():
            curve = self.curves.get(name)
            if curve is not None:
                found += interpolated(curve, size)
        for flag in work.flags:
            found += self.flags.get(flag, 0.0)
        return found


def place(size: float) -> tuple[int, float]:
    """Where a size lies between knots: the lower one, and how far towards the next."""
    at = min(max(math.log2(max(size, 1.0)), KNOTS[0]), KNOTS[-1])
    low = min(bisect_right(KNOTS, at), len(KNOTS) - 1) - 1
    return low, (at - KNOTS[low]) / (KNOTS[low + 1] - KNOTS[low])


def interpolated(curve: tuple[float, ...], size: float) -> float:
    """A curve's value at a size."""
    low, far = place(size)
    return curve[low] * (1 - far) + curve[low + 1] * far


@dataclass(frozen=True)
class Prediction:
    """What a call is predicted to take.

    Attributes:
        us: microseconds.
        terms: (kind of work, microseconds), the dearest first.
        beside: the same of what is done meanwhile, by a GPU or by its host, whichever is sooner.
    """

    us: float
    terms: tuple[tuple[str, float], ...]
    beside: tuple[tuple[str, float], ...] = ()

    def apart_from(self, other: Prediction) -> float:
        """The microseconds of work that the other does not have as well."""
        theirs = dict(other.terms)
        return self.us - sum(min(us, theirs.get(kind, 0.0)) for kind, us in self.terms)

    def __str__(self) -> str:
        told = " + ".join(f"{us:.3g} {kind}" for kind, us in self.terms if us >= 0.01 * self.us)
        beside = f", beside {_sum(self.beside):.3g}" if self.beside else ""
        whose = " of the host" if any(kind.endswith(HOST) for kind, _ in self.beside) else ""
        return f"{self.us:.3g} us = {told}{beside}{whose}"


def _sum(terms: Iterable[tuple[str, float]]) -> float:
    return sum(us for _, us in terms)


@dataclass(frozen=True)
class Prices:
    """All prices of a device.

    Attributes:
        device: its slug.
        by_kind: ``name_of`` of work → its price.
        source: where they come from, in words.
    """

    device: str
    by_kind: Mapping[str, Price]
    source: str = ""

    def of_call(self, p: Problem, works: Iterable[Work]) -> Prediction | None:
        """What a Problem's call takes, of these works; None where one of them has no price.

        A GPU computes while its host goes on: the slower of both decides. In a CUDA graph the host
        has nothing to do.
        """
        if p.device != "cuda":
            return self.predict(works, dtype_of(p))
        device: list[Work] = []
        hosts: list[Work] = []
        for work in works:
            (hosts if work.kind.endswith(HOST) else device).append(work)
        on_device = self.predict(device, dtype_of(p))
        by_host = self.predict(() if p.captured else hosts, ANY)
        if on_device is None or by_host is None:
            return None
        slow, fast = sorted((on_device, by_host), key=lambda part: -part.us)
        return Prediction(slow.us + _BESIDE * fast.us, slow.terms, fast.terms)

    def predict(self, works: Iterable[Work], dtype: str) -> Prediction | None:
        """What these works take one after the other; None where one of them has no price."""
        terms: dict[str, float] = {}
        for work in works:
            if work.kind == KEPT:
                continue
            price = self.by_kind.get(name_of(work.kind, work.dtype or dtype))
            if price is None:
                return None
            log_us = price.log_us(work)
            for variant in work.variants:
                varied = self.by_kind.get(name_of(work.kind, work.dtype or dtype, variant))
                log_us += 0.0 if varied is None else varied.log_us(work)
            us = work.units * math.exp(min(log_us, _MOST_EXPONENT))
            terms[work.kind] = terms.get(work.kind, 0.0) + us
        ordered = sorted(terms.items(), key=lambda term: -term[1])
        return Prediction(sum(terms.values()), tuple(ordered))

    def to_json(self, like: str = "") -> dict[str, Any]:
        """A JSON-ready dict; ``from_json`` is its inverse but for rounding.

        Args:
            like: the shipped device of which curves and flags that are the same are left out.
        """
        known = of_device(like)
        base = {} if known is None else known.by_kind
        told = {}
        for name, price in sorted(self.by_kind.items()):
            same = base.get(name)
            if price != same:
                told[name] = _plain(price, same)
        return {"format": FORMAT, "device": self.device, "like": like, "prices": told}

    @staticmethod
    def from_json(data: Mapping[str, Any], source: str = "") -> Prices:
        """Prices written by ``to_json``. Raises KeyError, TypeError or ValueError on bad data."""
        if data["format"] != FORMAT:
            raise ValueError(f"prices of format {data['format']}, not {FORMAT}")
        known = of_device(data.get("like", ""))
        found = {} if known is None else dict(known.by_kind)
        for name, item in data["prices"].items():
            same = found.get(name, Price(0.0))
            curves = {str(k): tuple(map(float, c)) for k, c in item.get("curves", {}).items()}
            if any(len(c) != len(KNOTS) for c in curves.values()):
                raise ValueError(f"a curve of {name} has not {len(KNOTS)} knots")
            flags = {str(k): float(v) for k, v in item.get("flags", {}).items()}
            curves, flags = {**same.curves, **curves}, {**same.flags, **flags}
            found[str(name)] = Price(float(item["level"]), curves, flags)
        return Prices(str(data["device"]), found, source)


def _plain(price: Price, same: Price | None) -> dict[str, Any]:
    """A price as JSON, without what changes nothing or is in ``same``."""
    known = Price(0.0) if same is None else same
    curves = {
        name: [round(v, 2) for v in curve]
        for name, curve in price.curves.items()
        if curve != known.curves.get(name)
    }
    flags = {n: round(v, 2) for n, v in price.flags.items() if v != known.flags.get(n, 0.0)}
    told = {"curves": {name: c for name, c in curves.items() if any(c)}, "flags": flags}
    return {"level": round(price.level, 3), **{k: v for k, v in told.items() if v}}


def name_of(kind: str, dtype: str, variant: str = "") -> str:
    """How a file names a kind of work of a dtype, and a variant's difference."""
    return f"{dtype} {kind}/{variant}" if variant else f"{dtype} {kind}"


def prices(device: str) -> Prices | None:
    """The prices of a device type (``"cpu"``, ``"cuda"``): the user's, and shipped ones of what
    those do not know; None where nothing like it was shipped."""
    if device == "cuda" and not torch.cuda.is_available():
        return None
    facts = device_facts(device)
    own = _read(own_path(facts))
    return shipped(facts) if own is None else _completed(own_path(facts), most_alike(facts))


@lru_cache(maxsize=8)
def _completed(path: Path, like: str) -> Prices | None:
    """The user's prices at a path, and a shipped device's of kinds that came after them."""
    own, base = _read(path), of_device(like)
    if own is None or base is None:
        return own
    return Prices(own.device, {**base.by_kind, **own.by_kind}, own.source)


def shipped(facts: DeviceFacts) -> Prices | None:
    """The shipped prices of the device that is most like this one, or None."""
    return of_device(most_alike(facts))


def own_path(facts: DeviceFacts) -> Path:
    """Where the user's prices of a device lie. Threads are part of a CPU's name."""
    threads = f"-{facts.units}threads" if facts.kind == "cpu" else ""
    return cache_dir() / f"prices-{facts.slug}{threads}.json"


def most_alike(facts: DeviceFacts) -> str:
    """The shipped device that is most like this one, by name of its file; ``""`` if none is of its
    kind."""
    here = traits(facts)
    if facts.kind == "cuda" and torch.version.hip is not None:
        return ""  # no rates of theirs are like those of the GPUs measured
    known = {name: there for name, there in _devices().items() if there["kind"] == facts.kind}
    return max(known, key=lambda name: _likeness(known[name], here), default="")


def traits(facts: DeviceFacts) -> dict[str, Any]:
    """What of a device decides which other one is like it, as plain data."""
    if facts.kind == "cpu":
        flags = cpu_flags()
        has = {trait: flag in flags for trait, flag in _CPU_TRAITS.items()}
        return {"kind": "cpu", "maker": cpu_maker(), "family": cpu_family(), **has}
    return {"kind": "cuda", "capability": list(facts.capability), "units": facts.units}


_CPU_TRAITS = {
    "vectors of 512 bits": "avx512f",
    "products of bfloat16": "avx512_bf16",
    "tiles": "amx_bf16",
    "products of float16": "avx512_fp16",
}


def _likeness(there: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[int, int]:
    """How many traits are the same; of as many the nearest generation of a maker's counts."""
    same = sum(there.get(name) == value for name, value in here.items())
    return same, -abs(there.get("family", 0) - here.get("family", 0))


@lru_cache(maxsize=1)
def _devices() -> dict[str, dict[str, Any]]:
    path = _FOLDER / "devices.json"
    return json.loads(path.read_text()) if path.exists() else {}


@lru_cache(maxsize=8)
def of_device(name: str) -> Prices | None:
    """The prices shipped under a name, None for ``""``."""
    if not name:
        return None
    data = json.loads((_FOLDER / f"{name}.json").read_text())
    return Prices.from_json(data, f"shipped for {name}")


@lru_cache(maxsize=8)
def _read(path: Path) -> Prices | None:
    if not path.exists():
        return None
    try:
        content = files.read(path, _MOST_BYTES)
    except OSError:
        return None
    try:
        return Prices.from_json(json.loads(content), "measured on this machine")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        warnings.warn(
            f"the prices in {path} are corrupt or foreign ({error}); ignored. "
            "`fastlinear calibrate` writes them anew.",
            CacheWarning,
            stacklevel=2,
        )
        return None


def remove(device: str) -> Path | None:
    """Delete the user's prices of a device; their file, or None where there was none."""
    path = own_path(device_facts(device))
    there = path.exists()
    path.unlink(missing_ok=True)
    forget()
    return path if there else None


def forget() -> None:
    """Have the user's prices read again."""
    _read.cache_clear()
    _completed.cache_clear()
