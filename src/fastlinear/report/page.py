"""page(data): picks the template of a result's kind and gives it what it shows."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from fastlinear.core.errors import InputError
from fastlinear.core.plain_text import plain_data
from fastlinear.report import charts, text, views

_VIEWS = {
    "optimize": views.optimize,
    "profile": views.profile,
    "index": views.index,
}


def page(data: dict[str, Any]) -> str:
    """One self-contained HTML page: inline CSS and SVG, no script, nothing fetched.

    Args:
        data: what ``Result.to_json()`` or ``ProfileReport.to_json()`` returns, or a list of
            results as ``{"kind": "index", "title": ..., "reports": [...]}`` with a
            ``{"name", "href", "data"}`` each.

    Raises:
        InputError: the kind is unknown.

    >>> page({"kind": "profile"}).startswith("<!doctype html>")
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
    return render(Path(__file__).with_name(f"{kind}.html.j2"), _VIEWS[kind](plain_data(data)))


def render(template: Path, view: dict[str, Any]) -> str:
    """The page of a template file, which may extend and import those of this package."""
    return _environment(template.parent).get_template(template.name).render(view=view)


@lru_cache(maxsize=2)
def _environment(folder: Path) -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader((folder, Path(__file__).parent)),
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
