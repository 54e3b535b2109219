"""A Result as text: every site with its fate, at any width."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fastlinear.core.timing import Ratio
from fastlinear.profile.records import IN_PLACE, Finding
from fastlinear.rewrite.site_outcome import SiteOutcome
from fastlinear.rewrite.table import render

KEPT = SiteOutcome(
    "encoder.layer.0.fc",
    "linear_act",
    "gelu",
    {"dims": {"M": 8}},
    "kept",
    "faster",
    "triton, with gelu in one call, 1.50x [1.40, 1.60]",
    predicted_gain_us=12.5,
    before_us=30.0,
    after_us=20.0,
    speedup=1.5,
    ci95=(1.4, 1.6),
    backends={"forward": "triton"},
    calls=1,
)
REFUSED = SiteOutcome("head", "linear_act", None, None, "refused", "hooks", "It has a hook.")


def result(*sites: SiteOutcome) -> Any:
    names = ("kept", "rejected", "refused", "undecided", "nothing_to_do")
    counts = {name: sum(s.status == name for s in sites) for name in names}
    return SimpleNamespace(
        sites=sites,
        kept=counts["kept"],
        summary=lambda: counts,
        model_class="Net",
        mode="inference",
        device="cpu",
        before_us=40.0,
        after_us=30.0,
        speedup=Ratio(1.33, 1.3, 1.4),
        notes=("accuracy judged against: float64 model",),
        findings=(),
    )


def finding(fqn: str, advice: str | None, gain: float = 5.0, title: str = "layer scale") -> Finding:
    details = {} if advice is None else {"advice": advice}
    message = "scales 64 features" if advice is None else f"scales 64 features. Use {advice}."
    numbers = (10.0, 5.0, gain, 0.0, 0.0, "memory")
    return Finding("diagonal_linear", fqn, title, message, *numbers, details)


@pytest.mark.parametrize("width", [40, 60, 80, 109, 110, 160])
def test_every_fact_is_there_and_every_line_fits(width: int) -> None:
    text = render(result(KEPT, REFUSED), width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for fact in ("encoder.layer.0.fc", "head", "gelu", "12.5", "30.0", "20.0", "1.50x", "kept"):
        assert fact in flat
    assert "Net, inference on cpu: 40 µs -> 30 µs a step (forward), 1.33x [1.30, 1.40]" in flat
    assert "2 linear sites: 1 kept, 0 rejected, 1 refused, 0 undecided, 0 nothing to do" in flat
    assert "note: accuracy judged against: float64 model" in flat
    if width < 110:
        assert "head: refused: It has a hook." in flat
        assert "Predicted gain 12.5 µs. 30.0 -> 20.0 µs, 1.50x." in flat


def test_alike_sites_share_a_row() -> None:
    sites = [replace(KEPT, fqn=f"layer.{i}") for i in range(3)]
    assert "layer.0 (+2 alike)" in render(result(*sites), 160)
    assert "layer.0 (+2 alike), gelu: kept:" in render(result(*sites), 80)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_advice_that_no_rewrite_follows_is_told(width: int) -> None:
    """With the code to paste; what is in place, and findings without advice, are not."""
    one = result(KEPT)
    one.findings = (
        finding("a.ls", "fl.scale(model.a)", 2.0),
        finding("b.ls", "fl.scale(model.b)", 7.0),
        finding("c.ls", "fl.other(model.c)", 0.0, "affine"),
        finding("d.ls", IN_PLACE, title="done"),
        finding("e.ls", None, title="no advice"),
    )
    text = render(one, width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    assert "advice, which optimize_ leaves to you:" in flat
    assert "b.ls (+1 alike): layer scale, about 9.0 µs a step. scales 64 features." in flat
    assert "Use fl.scale(model.b)." in flat
    assert "c.ls: affine. scales 64 features. Use fl.other(model.c)." in flat
    assert not any(name in flat for name in ("d.ls", "e.ls", IN_PLACE))
    assert "advice" not in render(result(KEPT), width)


def test_of_much_advice_the_rest_is_counted() -> None:
    one = result(KEPT)
    one.findings = tuple(finding(f"m{i}", "x", float(i), f"t{i}") for i in range(11))
    text = render(one, 160)
    assert "m10: t10" in text
    assert "m2: t2" not in text
    assert "and 3 more in result.findings" in text


def test_nothing_kept_is_no_speed_up() -> None:
    text = render(result(REFUSED), 160)
    assert "40 µs a step (forward); nothing was kept, the model is as it was" in text
    assert "1.33x" not in text
    assert "1 linear site: 0 kept" in text


@pytest.mark.parametrize("width", [80, 160])
def test_noise_is_called_noise(width: int) -> None:
    site = replace(KEPT, before_us=20.0, after_us=21.0, speedup=1.02, ci95=(0.95, 1.1))
    found = result(site)
    found.speedup = Ratio(0.99, 0.9, 1.08)
    text = " ".join(render(found, width).split())
    assert "1.02x, within noise" in text
    assert "0.99x [0.90, 1.08] in interleaved pairs: no difference beyond noise" in text
    assert "alone gained" not in text
    assert "1.50x, within noise" not in " ".join(render(result(KEPT), width).split())


def test_a_step_is_told_with_what_is_in_it() -> None:
    found = result(KEPT)
    found.mode = "train"
    assert "30 µs a step (forward and backward), " in " ".join(render(found, 160).split())


def test_sites_that_gain_and_a_step_that_does_not_are_told_together() -> None:
    found = result(KEPT, replace(KEPT, fqn="other"), replace(KEPT, fqn="", rule="compiled"))
    found.speedup = Ratio(1.01, 1.0, 1.03)
    text = " ".join(render(found, 160).split())
    assert "no difference beyond noise, though the kept sites alone gained 20.0 µs" in text
    found.speedup = Ratio(0.9, 0.8, 0.95)
    text = " ".join(render(found, 160).split())
    assert "pairs: slower beyond noise, though the kept sites alone gained 20.0 µs" in text
    found.speedup = Ratio(1.3, 1.2, 1.4)
    assert "alone gained" not in render(found, 160)


@pytest.mark.parametrize("where", ["site", "step", "nowhere"])
def test_times_that_order_otherwise_than_the_pairs_are_explained(where: str) -> None:
    found = result(replace(KEPT, before_us=19.0) if where == "site" else KEPT)
    if where == "step":
        found.before_us, found.after_us = 30.0, 31.0
    text = render(found, 160)
    assert ("the pairs count" in " ".join(text.split())) == (where != "nowhere")
    assert ("1.50x, by pairs" in " ".join(text.split())) == (where == "site")


def test_a_model_without_linears() -> None:
    text = render(result(), 160)
    assert text.startswith("Net, inference on cpu")
    assert "no linear layers here" in text
