"""A tuning measurement that leaves its decision open says so."""

from __future__ import annotations

from typing import Any

import pytest

from fastlinear.core.timing import Samples
from fastlinear.dispatch import cache, confidence
from fastlinear.dispatch import tune as tuning
from fastlinear.dispatch.confidence import doubt_of, rivals_of
from fastlinear.dispatch.select import select
from fastlinear.families import mlp
from fastlinear.families.linear.problem import problem

QUIET = (100.0, 100.5, 99.5, 100.2, 99.8)


def of(**times: tuple[float, ...]) -> dict[str, Samples]:
    return {name: Samples(name, us, "wall", 1, "clock") for name, us in times.items()}


def scaled(factor: float) -> tuple[float, ...]:
    return tuple(us * factor for us in QUIET)


def test_a_clear_winner_is_in_no_doubt() -> None:
    assert doubt_of("eager", of(eager=QUIET)) == ""
    assert doubt_of("eager", of(eager=QUIET, onednn=scaled(1.2))) == ""
    # as fast within 2%: whichever is taken, nothing is lost
    assert doubt_of("eager", of(eager=QUIET, onednn=scaled(0.99))) == ""


def test_a_rival_that_may_be_faster_is_named_with_how_much() -> None:
    noisy = (110.0, 90.0, 108.0, 93.0, 104.0)
    told = doubt_of("eager", of(eager=QUIET, slow=scaled(2.0), onednn=noisy))
    assert told == "within noise onednn may be 12% faster"


def test_times_that_scatter_are_a_doubt_without_any_rival() -> None:
    told = doubt_of("eager", of(eager=(100.0, 150.0, 90.0, 160.0, 120.0), slow=scaled(9.0)))
    assert told == "the median of eager lies between 90.0 and 160.0 us"


@pytest.mark.parametrize(("load", "said"), [(2.9, ""), (None, ""), (3.0, "busy (load 3.0, 2 p")])
def test_a_busy_machine_is_a_doubt(
    load: float | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confidence, "load_average", lambda: load)
    monkeypatch.setattr(confidence.os, "cpu_count", lambda: 2)
    told = doubt_of("eager", of(eager=QUIET))
    assert said in told
    assert bool(told) == bool(said)


def test_a_quiet_tuning_replaces_a_noisy_one_and_not_the_other_way_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = problem("forward", 8, 16, 16, dtype="float32", device="cpu", precision="highest")

    def measured(onednn: tuple[float, ...]) -> tuning.Tuned:
        def interleave(contenders: Any, **_: Any) -> dict[str, Samples]:
            return of(**dict.fromkeys(contenders, scaled(3.0)) | {"eager": QUIET, "onednn": onednn})

        monkeypatch.setattr(tuning, "interleave", interleave)
        return tuning.tune(p)

    noisy, quiet = (110.0, 50.0, 108.0, 60.0, 104.0), scaled(0.5)
    first = measured(noisy)
    assert (first.best, first.stored) == ("eager", True)
    assert "onednn may be" in first.doubt
    assert next(iter(cache.entries("cpu").values()))["doubt"] == first.doubt
    second = measured(quiet)
    assert (second.best, second.stored, second.doubt) == ("onednn", True, "")
    third = measured(noisy)
    assert (third.best, third.stored) == ("eager", False)
    assert next(iter(cache.entries("cpu").values()))["best"] == "onednn"


def test_rivals_are_those_within_noise_the_closest_first() -> None:
    noisy, noisier = (110.0, 90.0, 108.0, 93.0, 104.0), (150.0, 50.0, 130.0, 60.0, 120.0)
    times = of(eager=QUIET, slow=scaled(2.0), alike=scaled(0.99), onednn=noisy, other=noisier)
    assert rivals_of("eager", times) == ("other", "onednn")
    assert rivals_of("eager", of(eager=QUIET)) == ()


def test_a_noisy_tuning_does_not_replace_the_default_it_could_not_judge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = 2, (16, 16, 16)
    p = mlp.backends.problem("forward", *sizes, dtype="float32", device="cpu")
    default = select(p).backend.name  # one of ours, on any processor
    assert default != "eager"
    shaken = tuple(us * f for us, f in zip(QUIET, (0.1, 0.08, 1.2, 1.1, 0.09), strict=True))

    def interleave(contenders: Any, **_: Any) -> dict[str, Samples]:
        return of(**dict.fromkeys(contenders, scaled(3.0)) | {"eager": QUIET, default: whole})

    monkeypatch.setattr(tuning, "interleave", interleave)
    monkeypatch.setattr(confidence, "load_average", lambda: None)
    whole = shaken
    found = tuning.tune(p)
    assert (found.best, found.rivals) == ("eager", (default,))
    kept = select(p)
    assert (kept.backend.name, kept.source) == (default, "predicted")
    assert f"tuning took eager in its place and is in doubt: {found.doubt}; tune" in kept.reason
    assert "no measurement" not in kept.reason
    whole = scaled(1.5)  # a quiet measurement decides
    assert tuning.tune(p).doubt == ""
    assert (select(p).backend.name, select(p).source) == ("eager", "tuned")
