"""page(data): picks the template of a result's kind and gives it what it shows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jinja2

from fastlinear.core.errors import InputError
from fastlinear.core.plain_text import plain_data
from fastlinear.report import bench_view, charts, text, views

_VIEWS = {
    "optimize": views.optimize,
    "profile": views.profile,
    "bench": bench_view.bench,
    "index": views.index,
}


def page(data: dict[str, Any]) -> str:
    """One self-contained HTML page: inline CSS and SVG, no script, nothing fetched.

    Args:
        data: what ``Result.to_json()`` or ``ProfileReport.to_json()`` returns, benchmark rows as
            ``{"kind": "bench", "rows": [...]}``, or a list of results as
            ``{"kind": "index", "title": ..., "reports": [{"name", "href", "data"}, ...]}``.

    Raises:
        InputError: the kind is unknown.

    >>> page({"kind": "bench", "rows": []}).startswith("<!doctype html>")
    True
    """
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in _VIEWS:
        raise InputError(
            "page",
            f"data whose kind is one of {', '.join(_VIEWS)}",
            f"kind={kind!r}",
            "Pass what to_json() of a profile or a result returns.",
        )
    template = _environment().get_template(f"{kind}.html.j2")
    return template.render(view=_VIEWS[kind](plain_data(data)))


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("fastlinear.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in (
        "duration",
        "three",
        "times",
        "interval",
        "error",
        "percent",
        "count",
        "words",
        "step_of",
    ):
        made.filters[name] = getattr(text, name)
    made.filters["problem"] = text.problem
    made.filters["breakable"] = charts.breakable
    made.globals["ratio_bar"] = charts.ratio_bar
    made.globals["share_bar"] = charts.share_bar
    made.globals["strips"] = charts.strips
    made.globals["timeline"] = charts.timeline
    return made
