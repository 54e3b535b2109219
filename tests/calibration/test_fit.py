"""Fitted prices explain the calls they were fitted to, and what lies between; what nobody measured
stays what it was."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from fastlinear.calibration.calibrate import from_calls
from fastlinear.calibration.fit import Call, fit, moved
from fastlinear.dispatch.prices import KNOTS, Price, Prices, interpolated, name_of
from fastlinear.dispatch.work import Work, call, host, passed, product

_F32 = "float32"


def _true_us(m: int, k: int, n: int) -> float:
    """A library with a call of 2 us, whose rate grows with rows up to 64 and is halved if thin."""
    rate = 50_000.0 * min(m, 64) / 64 * (0.5 if n == 1 else 1.0)
    return 2.0 + m * k * n / rate


def _calls(count: int, seed: int) -> list[Call]:
    rng = Random(seed)
    found = []
    for _ in range(count):
        m, k, n = (1 << rng.randint(0, 9) for _ in range(3))
        works = (host("library"), *product("library", m, k, n, _F32))
        found.append(Call(works, _F32, _true_us(m, k, n) * math.exp(rng.gauss(0, 0.02))))
    return found


def _off(found: Prices, calls: list[Call]) -> list[float]:
    told = [found.predict(one.works, one.dtype) for one in calls]
    return sorted(abs(math.log(p.us / c.us)) for p, c in zip(told, calls, strict=True) if p)


def test_prices_explain_calls_that_were_not_fitted() -> None:
    found = fit(_calls(500, 1), "toy")
    off = _off(found, _calls(200, 2))
    assert len(off) == 200
    assert off[100] < 0.04
    assert off[190] < 0.15


def test_an_outlier_moves_little() -> None:
    calls = _calls(500, 1)
    spoilt = [
        Call(c.works, c.dtype, c.us * (20 if i % 25 == 0 else 1)) for i, c in enumerate(calls)
    ]
    assert _off(fit(spoilt, "toy"), _calls(200, 2))[100] < 0.06


def test_what_was_known_holds_where_nothing_was_measured() -> None:
    other = {name_of("other pass", _F32): Price(-3.0), name_of("other product", _F32): Price(-9.0)}
    before = fit(_calls(500, 1), "toy")
    before = Prices("toy", {**before.by_kind, **other})
    calls = [Call(c.works, c.dtype, 2 * c.us) for c in _calls(40, 3)]
    few = fit(calls, "toy", moved(before, calls))
    slower = [Call(c.works, c.dtype, 2 * c.us) for c in _calls(200, 2)]
    assert _off(few, slower)[100] < 0.12  # 40 calls of a machine that is half as fast tell all
    assert few.by_kind[name_of("other pass", _F32)] == Price(-3.0)  # no pass was measured
    level = few.by_kind[name_of("other product", _F32)].level
    assert level == pytest.approx(-9.0 + math.log(2.0), abs=0.1)


def test_hosts_are_fitted_to_whole_calls_and_work_to_pieces() -> None:
    pieces = [Call((host("alone library"), *c.works[1:]), _F32, c.us) for c in _calls(400, 1)]
    whole = [Call(c.works, _F32, c.us + 5.0) for c in _calls(60, 4)]
    found = from_calls(pieces, whole, "toy")
    told = found.predict((host("library"),), _F32)
    assert told is not None
    assert told.us == pytest.approx(7.0, rel=0.1)
    off = _off(found, [Call(c.works, _F32, c.us + 5.0) for c in _calls(200, 2)])
    assert off[100] < 0.04


def test_calls_are_told_from_small_passes_of_another_device() -> None:
    """There small passes took as long as large ones; here Python's calls do, and no others."""

    def made(alone: str, count: int, call_us: float) -> list[Call]:
        rng, found, names = Random(count), [], ("none", "relu", "gelu")
        for _ in range(count):
            numbers, name = 2.0 ** rng.uniform(0, 20), rng.choice(names)
            start, sweep = passed("copy", numbers, 1, name)
            works = host(f"{alone}copies"), replace(start, kind=alone + start.kind), sweep
            us = call_us + numbers * 1e-3 * (1 + names.index(name))
            found.append(Call(works, _F32, us * math.exp(rng.gauss(0, 0.05))))
        return found

    before = {
        "alone copies host": Price(1.2),
        "alone copy call": Price(0.0),
        "copies host": Price(-5.5),
        "copy call": Price(-0.7),
        "copy": Price(
            math.log(3e-3), {"numbers": tuple(math.log(2.0) * max(0, 10 - knot) for knot in KNOTS)}
        ),
    }
    known = Prices("other", {name_of(kind, _F32): price for kind, price in before.items()})
    found = from_calls(made("alone ", 400, 7.0), made("", 60, 1.0), "toy", known)
    small = [one for one in made("", 50, 1.0) if one.us < 2.0]
    assert len(small) > 20
    assert _off(found, small)[-1] < 0.3


def test_prices_outlive_a_file() -> None:
    found = fit(_calls(200, 1), "toy")
    again = Prices.from_json(found.to_json())
    for one in _calls(50, 2):
        first, second = (p.predict(one.works, _F32) for p in (found, again))
        assert first is not None
        assert second is not None
        assert second.us == pytest.approx(first.us, rel=0.04)
    with pytest.raises(ValueError, match="format"):
        Prices.from_json({**found.to_json(), "format": 0})
    torn = found.to_json()
    torn["prices"][name_of("library product", _F32)]["curves"]["m"] = [0.0]
    with pytest.raises(ValueError, match="knots"):
        Prices.from_json(torn)


def test_a_prediction_names_its_terms() -> None:
    prices = Prices(
        "toy",
        {
            name_of("a host", _F32): Price(math.log(3.0)),
            name_of("mul", _F32): Price(math.log(0.5), flags={"bias": math.log(2.0)}),
            name_of("mul call", _F32): Price(math.log(1.0)),
            name_of("mul", _F32, "relu"): Price(math.log(1.5)),
        },
    )
    told = prices.predict((host("a"), *passed("mul", 2, 4, "relu", "bias")), _F32)
    assert told is not None
    assert dict(told.terms) == pytest.approx({"mul": 12.0, "a host": 3.0, "mul call": 1.0})
    assert str(told) == "16 us = 12 mul + 3 a host + 1 mul call"
    assert prices.predict((Work("unknown"),), _F32) is None
    assert prices.predict((host("a"),), "bfloat16") is None
    assert call("x", 2.0).units == 2.0


def test_curves_are_straight_between_knots_and_level_beyond() -> None:
    curve = tuple(float(knot) for knot in KNOTS)
    assert interpolated(curve, 1) == 0.0
    assert interpolated(curve, 2**5.5) == pytest.approx(5.5)
    assert interpolated(curve, 2**13) == pytest.approx(13.0)
    assert interpolated(curve, 2**40) == KNOTS[-1]
    assert interpolated(curve, 0) == 0.0
