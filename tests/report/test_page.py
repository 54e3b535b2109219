"""Pages: complete, self-contained, escaped, and tolerant of what was not measured."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fastlinear.core.errors import InputError
from fastlinear.report import page, text
from fastlinear.report.charts import ratio_bar, strips
from tests.report import report_samples as samples

INDEX = {
    "kind": "index",
    "title": "All",
    "reports": [{"name": "a", "href": "a/report.html", "data": samples.optimize()}],
}
KINDS = {
    "optimize": samples.optimize(),
    "profile": samples.profile(),
    "index": INDEX,
}


@pytest.mark.parametrize("kind", KINDS)
def test_page_is_whole_and_self_contained(kind: str) -> None:
    html = page(KINDS[kind])
    samples.check_whole(html)


def test_optimize_page_shows_every_site_and_why() -> None:
    data = samples.optimize()
    html = page(data).replace("<wbr>", "")
    for site in data["sites"]:
        assert html.count(f"<code>{site['fqn']}</code>") >= 1
    assert "1.62" in html
    assert "1.60 – 1.64" in html
    assert "not faster beyond noise" in html
    assert "gemm_cpp" in html
    assert "20 of 20" in html
    assert html.count('class="dot before"') == len(data["step"]["samples"]["before"])


def test_every_finding_has_its_arithmetic_and_every_note_is_shown() -> None:
    data = samples.optimize()
    data["notes"] = ["accuracy judged against: float64 model"]
    findings = data["profile"]["findings"]
    html = page(data).replace("<wbr>", "")
    assert "accuracy judged against: float64 model" in html
    html = html[html.index("What was found") :]
    for f in findings:
        row = html[html.index(f"<code>{f['fqn'] or '(model)'}</code></td>") :]
        row = row[: row.index("</tr>")]
        for shown in (text.count(f["flops"]), text.count(f["bytes"]), f["bound"]):
            assert shown in row
        for us in (f["floor_us"], f["measured_us"], f["predicted_gain_us"]):
            assert text.duration(us) in row
        assert text.percent(f["floor_us"] / f["measured_us"]) in row


def test_values_are_escaped() -> None:
    data = samples.optimize()
    data["model"]["class"] = "<img src=x onerror=alert(1)>"
    html = page(data)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<img" not in html


def test_a_step_is_told_with_what_is_in_it() -> None:
    for mode, step in (("train", "forward and backward"), ("inference", "forward")):
        data = {**samples.optimize(), "mode": mode}
        assert f"one whole step ({step})" in page(data)
        assert f"one step ({step})" in page({**samples.profile(), "mode": mode})
        reports = [{"name": "a", "href": "a.html", "data": data}]
        assert f"{mode} ({step})" in page({"kind": "index", "title": "t", "reports": reports})


def test_undecided_sites_are_not_called_healthy() -> None:
    found = samples.site("fc", "undecided", reason="the measurement is in doubt")
    shown = page({**samples.optimize(), "sites": [found], "summary": {"undecided": 1}})
    assert "no measurement says whether a rewrite would help" in shown
    assert "Healthy" not in shown


def test_nothing_kept_and_missing_fields() -> None:
    bare: dict[str, Any] = {
        "kind": "optimize",
        "model": {"class": "Empty"},
        "sites": [],
        "verdicts": [],
        "summary": {},
        "step": {"before_us": None, "after_us": None, "speedup": None, "samples": {}},
        "environment": None,
        "profile": None,
    }
    assert "Nothing was kept" in page(bare)
    bare["step"]["speedup"] = {"median": 1.0, "low": 1.0, "high": 1.0}
    assert "Nothing was kept" in page(bare)
    assert page({"kind": "profile"})


def test_failed_verdict_is_shown_first() -> None:
    data = samples.optimize()
    data["verdicts"].append(
        {"name": "grad.bad", "error": None, "torch_error": 1e-7, "limit": 2e-7, "passed": False}
    )
    html = page(data).replace("<wbr>", "")
    assert "20 of 21" in html
    assert html.index("grad.bad") < html.index("draw0.hidden_states")
    assert "not finite" in html


def test_page_does_not_change_its_data() -> None:
    for data in KINDS.values():
        before = copy.deepcopy(data)
        page(data)
        assert data == before


@pytest.mark.parametrize("data", [{}, {"kind": "plan"}, {"kind": None}, []])
def test_unknown_kind(data: Any) -> None:
    with pytest.raises(InputError, match="optimize, profile, index"):
        page(data)


@pytest.mark.parametrize(
    ("us", "written"),
    [(None, "–"), (0.0, "0 µs"), (12.34, "12.3 µs"), (4561.0, "4.56 ms"), (1.2e6, "1.20 s")],
)
def test_durations(us: float | None, written: str) -> None:
    assert text.duration(us) == written


def test_charts_mark_direction() -> None:
    assert "dot gain" in ratio_bar(1.5, 1.4, 1.6, 2.0)
    assert "dot loss" in ratio_bar(0.5, 0.4, 0.6, 2.0)
    assert "dot even" in ratio_bar(1.0, 0.9, 1.1, 2.0)
    assert strips([("before", "before", [])]) == ""
    assert strips([("<b>", "before", [1.0])]).count("&lt;b&gt;") == 1
